"""DeepSpeed's enums, which scripts compare with numbers and words."""

from shardwise.deepspeed.calls.enums import (
    OffloadDeviceEnum,
    OffloadStateTypeEnum,
    ZeroParamStatus,
    ZeroStageEnum,
)


def test_stages_are_numbers_and_devices_are_words() -> None:
    assert [int(stage) for stage in ZeroStageEnum] == [0, 1, 2, 3]
    assert (
        ZeroStageEnum(3) is ZeroStageEnum.weights is ZeroStageEnum.max_stage and ZeroStageEnum.gradients == 2
    )
    assert OffloadDeviceEnum("nvme") is OffloadDeviceEnum.nvme and OffloadDeviceEnum.cpu == "cpu"


def test_words_are_those_of_their_names() -> None:
    assert all(
        kind.value == kind.name for kinds in (OffloadDeviceEnum, OffloadStateTypeEnum) for kind in kinds
    )
    assert len({status.value for status in ZeroParamStatus}) == 3
