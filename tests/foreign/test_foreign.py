"""Models of transformers in every layout: exact, or refused by name before a step; never a wrong number."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from tests.foreign import case, sweep  # noqa: E402

SUITE = [
    ("causal", "LlamaForCausalLM", "llama"),
    ("causal", "Gemma2ForCausalLM", "gemma2"),
    ("causal", "GPTNeoXForCausalLM", "gpt_neox"),
    ("masked", "BertForMaskedLM", "bert"),
    ("seq2seq", "T5ForConditionalGeneration", "t5"),
]
"""Classes of the everyday suite; ``make soak`` runs all."""


def on_ranks(world: Any, kind: str, name: str, model_type: str, layout: str, folder: str) -> dict[str, Any]:
    return case.laid_out(world, kind, name, model_type, layout, Path(folder), {})


@pytest.mark.parametrize("layout", ["zero3", "pp2", "tp2"])
@pytest.mark.parametrize(("kind", "name", "model_type"), SUITE, ids=[name for _, name, _ in SUITE])
def test_a_class_is_exact_or_refused(
    ranks: Any, tmp_path: Path, kind: str, name: str, model_type: str, layout: str
) -> None:
    case.plain(kind, name, model_type, tmp_path, {})
    answer = sweep.together(ranks(2).run(on_ranks, kind, name, model_type, layout, str(tmp_path)))
    assert answer["verdict"] in sweep.GOOD, answer


_BY_TILES = ("GPT2LMHeadModel", "GPTNeoXForCausalLM", "Gemma2ForCausalLM", "CohereForCausalLM")
"""Classes of which nothing is refused."""


@pytest.mark.parametrize(
    ("kind", "name", "model_type", "layout"),
    [
        ("causal", "GPT2LMHeadModel", "gpt2", "tp2-mlp"),
        ("masked", "BertForMaskedLM", "bert", "tp2-mlp"),
        ("causal", "GPTNeoXForCausalLM", "gpt_neox", "zero3-mlp"),
        ("causal", "Gemma2ForCausalLM", "gemma2", "tp2-logits"),
        ("causal", "CohereForCausalLM", "cohere", "zero3-logits"),
        *(
            pytest.param(*each, layout, marks=pytest.mark.soak)
            for each in (
                *SUITE,
                ("causal", "GPT2LMHeadModel", "gpt2"),
                ("causal", "DeepseekV3ForCausalLM", "deepseek_v3"),
            )
            for layout in ("zero3-mlp", "pp2-mlp", "tp2-mlp", "pp2-logits", "tp2-logits")
        ),
    ],
)
def test_by_tiles(ranks: Any, tmp_path: Path, kind: str, name: str, model_type: str, layout: str) -> None:
    case.plain(kind, name, model_type, tmp_path, {})
    answer = sweep.together(ranks(2).run(on_ranks, kind, name, model_type, layout, str(tmp_path)))
    assert answer["verdict"] == "exact" or name not in _BY_TILES and answer["verdict"] in sweep.GOOD, answer


def test_slices_and_stages_together(ranks: Any, tmp_path: Path) -> None:
    """An embedding that is cut inside its own forward is a stand-in on the second stage."""
    case.plain("causal", "Gemma2ForCausalLM", "gemma2", tmp_path, {})
    answers = ranks(4).run(on_ranks, "causal", "Gemma2ForCausalLM", "gemma2", "tp2pp2", str(tmp_path))
    assert sweep.together(answers)["verdict"] == "exact", answers


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
def test_every_class_is_exact_or_refused(tmp_path: Path) -> None:
    results = tmp_path / "foreign.jsonl"
    command = [sys.executable, "-m", "tests.foreign.sweep", "--results", str(results)]
    ended = subprocess.run(command, capture_output=True, text=True)
    faults = [
        (title, layout, answer["verdict"], answer["text"])
        for title, by_layout in sweep.read(results).items()
        for layout, answer in by_layout.items()
        if answer["verdict"] not in sweep.GOOD
    ]
    assert not faults and not ended.returncode, faults or ended.stderr[-2000:]
