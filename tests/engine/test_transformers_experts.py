"""Experts of transformers' models over several ranks equal one process: losses, norm, gradients and weights of two
steps (tests/foreign/case.py), with fp32 inside them widened."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5")


from tests.foreign import case, sweep  # noqa: E402

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


@pytest.mark.soak
@pytest.mark.parametrize("layout", ["zero3", "ep2", *case.OF_EXPERTS])
@pytest.mark.parametrize("name", MODELS)
def test_every_layout_equals_one_process(ranks: Any, tmp_path: Path, name: str, layout: str) -> None:
    check(ranks, name, (layout,), tmp_path)
