"""Names that programs around DeepSpeed import: constants, models of configuration blocks, schedules, hosts, parts that
are absent."""

import importlib
import subprocess
import sys
from typing import Any

import pytest
import torch
from pydantic import Field, ValidationError

import shardwise.deepspeed as deepspeed
from shardwise.base.errors import ConfigError, UsageError
from shardwise.deepspeed.absent_names import ABSENT, AREAS
from shardwise.deepspeed.calls import launching
from shardwise.deepspeed.calls.launching import LauncherError, parse_resource_filter
from shardwise.deepspeed.training.config_models import (
    DeepSpeedConfigModel,
    DeepSpeedFP16Config,
    DeepSpeedZeroConfig,
)
from shardwise.deepspeed.training.instructions import (
    BackwardPass,
    DataParallelSchedule,
    ForwardPass,
    InferenceSchedule,
    PipeSchedule,
    RecvActivation,
    RecvGrad,
    SendActivation,
    SendGrad,
    TrainSchedule,
)


@pytest.mark.parametrize("area", sorted(AREAS))
def test_an_absent_part_is_imported_and_refused_when_it_is_used(area: str) -> None:
    module = importlib.import_module(f"shardwise.deepspeed.{area}")
    found = module.Anything
    assert not isinstance(3, found)
    with pytest.raises(UsageError, match=r"Anything: a part of DeepSpeed that is not here"):
        found()
    with pytest.raises(AttributeError):
        module.__nothing__  # noqa: B018


def test_absent_names_of_modules_that_are_here() -> None:
    from shardwise.deepspeed.runtime.utils import register_output_backward_hooks
    from shardwise.deepspeed.runtime.zero.stage3 import IPGBucketZ3

    for found in (register_output_backward_hooks, IPGBucketZ3):
        with pytest.raises(UsageError, match=found.__name__):
            found()
    assert all(names for names in ABSENT.values())
    with pytest.raises(ImportError, match="did you mean"):
        exec("from shardwise.deepspeed.runtime.utils import see_memory_usag")


def test_constants_and_versions() -> None:
    from shardwise.deepspeed.git_version_info import torch_info, version
    from shardwise.deepspeed.runtime.config import ADAM_OPTIMIZER, ONEBIT_ADAM_OPTIMIZER
    from shardwise.deepspeed.runtime.lr_schedules import WARMUP_LR, WARMUP_MIN_LR
    from shardwise.deepspeed.utils.torch import required_torch_version

    assert (WARMUP_LR, WARMUP_MIN_LR, ADAM_OPTIMIZER) == ("WarmupLR", "warmup_min_lr", "adam")
    assert ONEBIT_ADAM_OPTIMIZER == "onebitadam" and version == deepspeed.__version__
    assert torch.__version__.startswith(torch_info["version"]) and required_torch_version(min_version=2.1)


def test_kernels_have_counterparts_or_not() -> None:
    from shardwise.deepspeed.ops.op_builder import AsyncIOBuilder, FusedAdamBuilder

    assert FusedAdamBuilder().is_compatible() and deepspeed.ops.__compatible_ops__[FusedAdamBuilder.NAME]
    assert not AsyncIOBuilder().is_compatible()
    with pytest.raises(UsageError, match=r"FusedAdamBuilder\.load"):
        FusedAdamBuilder().load()


def test_builders_by_the_file_of_each() -> None:
    from shardwise.deepspeed.ops.aio import AsyncIOBuilder
    from shardwise.deepspeed.ops.op_builder.cpu_adam import CPUAdamBuilder

    assert AsyncIOBuilder is deepspeed.ops.op_builder.AsyncIOBuilder
    assert CPUAdamBuilder is deepspeed.ops.op_builder.CPUAdamBuilder
    hip = torch.version.hip
    assert CPUAdamBuilder.is_rocm_pytorch() == (hip is not None)
    assert CPUAdamBuilder.installed_rocm_version() == (0, 0) or hip is not None


def test_questions_about_parts_that_are_absent() -> None:
    from shardwise.deepspeed.compile.util import is_deepcompile_supported
    from shardwise.deepspeed.ops.triton_ops import is_triton_available

    assert not is_deepcompile_supported() and not is_triton_available()


def test_an_absent_part_is_an_attribute_of_the_package_too() -> None:
    with pytest.raises(UsageError, match=r"elasticity\.compute_elastic_config"):
        deepspeed.elasticity.compute_elastic_config({})


def test_words_of_checkpoints() -> None:
    from shardwise.deepspeed.checkpoint import UNIVERSAL_CHECKPOINT_INFO
    from shardwise.deepspeed.checkpoint.constants import CAT_DIM, DS_VERSION, MODEL_FILE_PREFIX
    from shardwise.deepspeed.runtime.swap_tensor import MIN_SWAPPABLE_BYTES

    assert (UNIVERSAL_CHECKPOINT_INFO, MODEL_FILE_PREFIX) == ("universal_checkpoint_info", "mp_rank_")
    assert (CAT_DIM, DS_VERSION, MIN_SWAPPABLE_BYTES) == ("cat_dim", "ds_version", 1 << 20)


def test_getters_of_keys() -> None:
    from shardwise.deepspeed.runtime.config import get_gradient_clipping, get_optimizer_name

    assert get_gradient_clipping({}) == 1.0 and get_gradient_clipping({"gradient_clipping": 0.0}) == 0.0
    assert get_optimizer_name({"optimizer": {"type": "Lamb"}}) == "Lamb" and get_optimizer_name({}) is None


def test_accelerators_by_class() -> None:
    from shardwise.deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
    from shardwise.deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    assert CPU_Accelerator().device_name() == "cpu" and CUDA_Accelerator().device_name() == "cuda"
    assert isinstance(CPU_Accelerator(), deepspeed.accelerator.DeepSpeedAccelerator)


class Model(DeepSpeedConfigModel):
    size: int = 1
    words: list[str] | None = None
    word: str | None = Field(
        None,
        json_schema_extra={"deprecated": True, "new_param": "words", "new_param_fn": lambda word: [word]},
    )


def test_models_of_configurations() -> None:
    assert Model(word="a").words == ["a"] and Model(size="auto").size == 1
    with pytest.raises(ValidationError):
        Model(sizes=3)
    with pytest.raises(AssertionError, match="word is an older name of words"):
        Model(word="a", words=["b"])
    with pytest.raises(ValidationError, match="must be a number"):
        DeepSpeedFP16Config(loss_scale=[])
    with pytest.raises(ValidationError, match="above 0"):
        DeepSpeedFP16Config(enabled=True, loss_scale_window=0)
    assert DeepSpeedFP16Config(loss_scale=128, loss_scale_window=0).loss_scale == 128


def test_the_block_of_zero() -> None:
    leaves = DeepSpeedZeroConfig(leaf_module={"classes": "my.Class"}).leaf_module
    assert (leaves.classes, leaves.names, DeepSpeedZeroConfig().leaf_module.classes) == (["my.Class"], [], [])
    block = DeepSpeedZeroConfig(stage=3, stage3_prefetch_bucket_size=5, cpu_offload=True)
    assert (block.prefetch_bucket_size, block.overlap_comm, block.offload_param) == (5, True, None)
    assert block.offload_optimizer.device == "cpu" and not block.offload_optimizer.pipeline
    assert block.model_dump()["stage"] == 3 and "stage=3" in repr(block)
    with pytest.raises(ConfigError, match="unknown key"):
        DeepSpeedZeroConfig(stag=3)
    with pytest.raises(AttributeError, match="has no 'nothing'"):
        block.nothing  # noqa: B018


def test_sizes_of_a_batch_follow_from_one_another() -> None:
    config = deepspeed.DeepSpeedConfig({"train_batch_size": 64})
    assert (config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps) == (64, 1)
    config.train_batch_size, config.train_micro_batch_size_per_gpu = 64, 16
    config._configure_train_batch_size()
    assert config.gradient_accumulation_steps == 4
    config.train_batch_size = 33
    with pytest.raises(deepspeed.DeepSpeedConfigError, match="give two of them that divide"):
        config._configure_train_batch_size()
    for error in (ValueError, AssertionError):
        with pytest.raises(error, match="unknown key"):
            deepspeed.DeepSpeedConfig({"train_batch_sise": 3})
    with pytest.raises(AssertionError, match="model is required"):
        deepspeed.initialize(config={"train_batch_size": 1})


def slots(steps: Any, kind: type) -> dict[int, int]:
    """The slot of each instruction of a kind, counted."""
    places = [slot for slot, step in enumerate(steps) for each in step if type(each) is kind]
    return dict(enumerate(places))


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("microbatches", [1, 4, 7])
def test_schedules_of_all_stages_fit_together(stages: int, microbatches: int) -> None:
    """What one stage sends in a slot the other receives in the same slot, and every pass has its slot."""
    trains = [list(TrainSchedule(microbatches, stages, stage)) for stage in range(stages)]
    infers = [list(InferenceSchedule(microbatches, stages, stage)) for stage in range(stages)]
    for stage, steps in enumerate(trains):
        assert slots(steps, ForwardPass) == {m: 2 * m + stage for m in range(microbatches)}
        assert slots(steps, BackwardPass) == {m: 2 * m + 2 * stages - 1 - stage for m in range(microbatches)}
        assert len(steps) == 2 * (microbatches + stages - 1)
        assert [type(each).__name__ for each in steps[-1][-3:]] == [
            "ReduceTiedGrads",
            "ReduceGrads",
            "OptimizerStep",
        ]
    for stage in range(stages - 1):
        for steps in (trains, infers):
            assert slots(steps[stage], SendActivation) == slots(steps[stage + 1], RecvActivation)
        assert slots(trains[stage], RecvGrad) == slots(trains[stage + 1], SendGrad)
    for steps in infers:
        assert len(slots(steps, ForwardPass)) == microbatches
    assert len(list(DataParallelSchedule(microbatches, 1, 0))) == microbatches
    with pytest.raises(NotImplementedError, match="yields its steps"):
        next(PipeSchedule(1, 1, 0))


HOSTS = {"a": [0, 1, 2], "b": [0, 1]}


@pytest.mark.parametrize(
    ("include", "exclude", "found"),
    [
        ("", "", HOSTS),
        ("b", "", {"b": [0, 1]}),
        ("b:1@a:2,0", "", {"a": [0, 2], "b": [1]}),
        ("a:1,1@a:0", "", {"a": [0, 1]}),
        ("", "a@b:0", {"b": [1]}),
        ("", "a:0,1,2@b", {}),
    ],
)
def test_slots_that_are_used(include: str, exclude: str, found: dict[str, list[int]]) -> None:
    assert parse_resource_filter(HOSTS, include, exclude) == found


def test_wrong_hosts_and_slots() -> None:
    for include, exclude in (("a", "b"), ("c", ""), ("a:7", ""), ("", "a:0@5:"), ("a:x", "")):
        with pytest.raises(LauncherError):
            parse_resource_filter(HOSTS, include, exclude)
    assert launching._parse_hostfile(["# hosts", "", "a slots=2", " b slots=1"]) == {"a": 2, "b": 1}
    for lines in ([], ["a"], ["a b slots=1"], ["a slots=1", "a slots=2"]):
        with pytest.raises(ValueError, match="hostfile"):
            launching._parse_hostfile(lines)
    assert launching.parse_range_list("0,2-4,6") == [0, 2, 3, 4, 6]
    for text in ("8,2", "6-2", "0,2-6,5", "x"):
        with pytest.raises(ValueError, match="rising order"):
            launching.parse_range_list(text)
    with pytest.raises(ValueError, match="leave out --num_gpus"):
        launching.main(["--num_gpus", "1", "-i", "localhost", "train.py"])
    assert launching.fetch_hostfile("/nowhere/hosts") is None


def test_the_command_starts_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    def run(command: list[str], check: bool) -> Any:
        started.append(command)
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(SystemExit) as ended:
        launching.main(["--num_gpus", "2", "train.py", "--include", "x"])
    assert ended.value.code == 3
    assert started == [
        [
            sys.executable,
            "-m",
            "shardwise",
            "launch",
            "--as-deepspeed",
            "--num_gpus",
            "2",
            "train.py",
            "--include",
            "x",
        ]
    ]


def test_ranks_of_experts() -> None:
    from shardwise.deepspeed.utils.groups import _get_expert_parallel_ranks

    together, alike = _get_expert_parallel_ranks(8, 2, 2)
    assert together == [[0, 2], [4, 6], [1, 3], [5, 7]] and alike == [[0, 4], [2, 6], [1, 5], [3, 7]]
    together, _ = _get_expert_parallel_ranks(4, 1, 2, use_data_before_expert_parallel_=True)
    assert together == [[0, 2], [1, 3]]
    with pytest.raises(UsageError, match="do not divide"):
        _get_expert_parallel_ranks(6, 2, 2)


def test_parts_of_equal_weight() -> None:
    from shardwise.deepspeed.runtime.utils import partition_balanced

    assert partition_balanced([1, 1, 1, 1, 0, 1], 3)[-1] == 6
    borders = partition_balanced([5, 1, 1, 1, 1, 1], 2)
    assert borders == [0, 1, 6]
