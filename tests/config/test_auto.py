"""What is left out is filled in by one function, which says what it chose."""

import pytest

from shardwise.base.errors import ConfigError, MeshError
from shardwise.config.auto import resolve
from shardwise.config.run import load


def test_prefetch_follows_the_device() -> None:
    assert resolve(load({}), 2, "cpu").config.zero.prefetch_bytes == 0
    assert resolve(load({}), 2, "cuda").config.zero.prefetch_bytes == 64 << 20
    assert resolve(load({"zero": {"prefetch_bytes": 3}}), 2, "cpu").config.zero.prefetch_bytes == 3
    for device, under_way in (("cpu", 0), ("cuda", 1)):
        assert resolve(load({}), 2, device).config.zero.reductions_under_way == under_way
    assert (
        resolve(load({"zero": {"reductions_under_way": 0}}), 2, "cuda").config.zero.reductions_under_way == 0
    )


def test_products_overlap_exchanges_on_devices_alone() -> None:
    for device, wanted in (("cpu", "off"), ("cuda", "auto")):
        assert resolve(load({}), 2, device).config.tensor.overlap == wanted
    assert resolve(load({"tensor": {"overlap": 3}}), 2, "cpu").config.tensor.overlap == 3


def test_batch_and_mesh_are_derived_and_said() -> None:
    found = resolve(load({"batch": {"global_size": 64, "micro_size": 4}}), 4, "cpu")
    assert found.config.batch.accumulation == 4
    assert found.mesh.size("dp") == 4
    assert found.choices == ("mesh dp=4", "batch 64 = 4 micro × 4 accumulation × 4 ranks")


def test_resolving_twice_changes_nothing() -> None:
    once = resolve(load({"batch": {"global_size": 64}, "train": {"steps": 7}}), 4, "cpu")
    assert resolve(once.config, 4, "cpu") == once


def test_the_schedule_ends_with_training() -> None:
    found = resolve(load({"schedule": {"type": "cosine"}, "train": {"steps": 70}}), 1, "cpu")
    assert found.config.schedule.total_steps == 70
    with pytest.raises(
        ConfigError, match="cosine needs a last step; give schedule.total_steps, train.steps or"
    ):
        resolve(load({"schedule": {"type": "cosine"}}), 1, "cpu")


def test_rules_that_need_resolved_numbers() -> None:
    given = {"schedule": {"type": "linear", "warmup_steps": 50}, "train": {"steps": 50}}
    with pytest.raises(ConfigError, match="warmup_steps 50 must be less than total_steps 50"):
        resolve(load(given), 1, "cpu")


def test_a_mesh_that_does_not_multiply() -> None:
    with pytest.raises(MeshError, match="dp=2 covers 2 ranks but the job has 3"):
        resolve(load({"mesh": {"dp": 2}}), 3, "cpu")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"zero": {"stage": 1, "reduce": "microbatch"}}, "which is stage 2; stage is 1"),
        ({"pipeline": {"schedule": "interleaved_1f1b", "virtual_stages": 2}}, "mesh.pp is 1"),
        ({"zero": {"stage": 3, "reshard_after_forward": False}}, "use zero.stage: 2"),
        ({"mesh": {"pp": 2}, "batch_norm": "synchronized"}, "set batch_norm: per_rank"),
    ],
    ids=str,
)
def test_rules(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(load(given), 4, "cpu")
