"""Keys of other frameworks and of older versions: each is answered with ours."""

from functools import cache
from typing import Any

import pytest

from shardwise.base.errors import ConfigError
from shardwise.config import keys
from shardwise.config.foreign_keys import FOREIGN_KEYS, FORMER_KEYS
from shardwise.config.run import RunConfig, load


def test_every_suggestion_for_a_foreign_key_is_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "all_keys", cache(keys.all_keys))  # each call reads all policies
    for key, ours in FOREIGN_KEYS.items():
        assert keys.find(ours.partition(",")[0].partition(" ")[0].partition(":")[0]), (key, ours)


def test_former_keys_are_refused_with_their_new_name() -> None:
    def refusal(path: str) -> str:
        given: Any = [{}]
        for part in reversed(path.split(".")):  # a value that is wrong for every key
            given = {part: given}
        with pytest.raises(ConfigError) as caught:
            RunConfig.parse(
                given | ({"data": {"kind": "clicks", **given["data"]}} if "data" in given else {})
            )
        return str(caught.value)

    for former, ours in FORMER_KEYS.items():
        *block, key = former.split(".")
        assert f"unknown key {key!r}; here it is {ours}" in refusal(former), former
        new = ours.partition(" ")[0].rpartition(".")[2]
        assert "unknown key" not in refusal(".".join([*block, new])), former  # the value alone is at fault
    assert "here it is exchange" in refusal("tables.named.user.sends")


@pytest.mark.parametrize(
    ("given", "overrides", "said"),
    [
        ({"offload": {"optimizer": "nvme"}}, [], "did you mean 'disk'?"),
        ({"offload": {"optimizer": "cpu"}}, [], "did you mean 'host'?"),
        ({"precision": "float16"}, [], "did you mean 'fp16'?"),
        ({"optimizer": {"type": "adamww"}}, [], "did you mean 'adamw'?"),
        ({"cp": 2}, [], "unknown key 'cp'; here it is mesh.cp"),
        (
            {"zero": {"stage": 1}},
            ["zero.stge=3"],
            "^--set zero.stge=3: zero: unknown key 'stge'; did you mean 'stage'",
        ),
        ({"zero": {"stage": 1}}, ["optimizer.lr=-1"], "^--set optimizer.lr=-1: optimizer.lr: "),
        (
            {"fp16": True, "per_device_train_batch_size": 8, "logging_steps": 10, "num_train_epochs": 3},
            [],
            "4 faults:\n  unknown key 'fp16'; here it is precision: fp16\n"
            "  unknown key 'per_device_train_batch_size'; here it is batch.micro_size\n"
            "  unknown key 'logging_steps'; here it is monitor.print_every\n"
            "  unknown key 'num_train_epochs'; here it is train.steps, which counts optimizer steps and not epochs",
        ),
    ],
)
def test_errors_name_the_fault_and_a_word_of_ours(
    given: dict[str, Any], overrides: list[str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        load(given, overrides)
