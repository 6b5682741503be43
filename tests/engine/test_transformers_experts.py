"""Experts of transformers' models over several ranks equal one process: losses, norm, gradients and weights of two
steps (tests/foreign/case.py), with fp32 inside them widened."""

import logging
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5")


import shardwise  # noqa: E402
from shardwise.base.errors import PlanError  # noqa: E402
from tests.foreign import case, sweep  # noqa: E402
from tests.foreign.models import batch, build  # noqa: E402

MODELS = {
    "MixtralForCausalLM": "mixtral",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "GptOssForCausalLM": "gpt_oss",
}
"""Class -> model type."""
OFTEN = [
    ("MixtralForCausalLM", ("ep2", "tp2-ep2")),
    ("Qwen3MoeForCausalLM", ("ep2-recompute",)),
    ("GptOssForCausalLM", ("tp2-etp2",)),
    ("DeepseekV3ForCausalLM", ("ep2-zero1",)),
]
"""The everyday suite; the soak has all of both."""


def on_ranks(world: Any, name: str, layouts: tuple[str, ...], folder: str) -> list[dict[str, Any]]:
    return [
        case.laid_out(world, "causal", name, MODELS[name], layout, Path(folder), {}) for layout in layouts
    ]


def check(ranks: Any, name: str, layouts: tuple[str, ...], folder: Path) -> None:
    case.plain("causal", name, MODELS[name], folder, {})
    (size,) = {(case.LAYOUTS | case.OF_EXPERTS)[layout][0] for layout in layouts}
    by_rank = ranks(size).run(on_ranks, name, layouts, str(folder))
    for layout, answers in zip(layouts, zip(*by_rank, strict=True), strict=True):
        assert sweep.together(list(answers))["verdict"] == "exact", (layout, answers)


@pytest.mark.parametrize(("name", "layouts"), OFTEN, ids=[name for name, _ in OFTEN])
def test_equals_one_process(ranks: Any, tmp_path: Path, name: str, layouts: tuple[str, ...]) -> None:
    check(ranks, name, layouts, tmp_path)


ROUNDING = ("MixtralForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM")


def first_steps(world: Any) -> list[str]:
    """Take the first step of fp64 models that round to fp32 inside; return what the check says."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("shardwise")
    logger.addHandler(handler)
    try:
        for name in ROUNDING:
            config = {"mesh": {"ep": 2}, "optimizer": {"type": "sgd", "lr": 0.1}}
            engine = shardwise.initialize(build(name, MODELS[name]), config, world=world)
            try:
                engine.train_step([batch("causal", world.rank)])
            except PlanError as error:
                said.append(f"{name}: {error}")
            engine.close()
    finally:
        logger.removeHandler(handler)
    return [text for text in said if "check" in text]


def test_the_default_check_takes_models_that_round_to_fp32(ranks: Any) -> None:
    """The limit was that of fp64, which the fp32 inside of these models does not reach; none is left out either."""
    assert ranks(2).run(first_steps) == [[], []]


@pytest.mark.soak
@pytest.mark.parametrize("layout", ["zero3", "ep2", *case.OF_EXPERTS])
@pytest.mark.parametrize("name", MODELS)
def test_every_layout_equals_one_process(ranks: Any, tmp_path: Path, name: str, layout: str) -> None:
    check(ranks, name, (layout,), tmp_path)
