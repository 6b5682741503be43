"""The page of the sweep: what was found of each class in each layout."""

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import transformers

from tests.foreign.case import EXACT, LAYOUTS

_HEADINGS = {"zero3": "ZeRO 3", "pp2": "pp 2", "tp2": "tp 2", "tp2pp2": "tp 2 × pp 2", "ep2": "ep 2"}
_KINDS = {"causal": "Causal", "masked": "Masked", "seq2seq": "Sequence to sequence"}

Answers = Mapping[str, Mapping[str, Mapping[str, Any]]]


def page(found: Answers) -> str:
    """Markdown."""
    reasons: dict[str, int] = {}
    counts = Counter(answer["verdict"] for each in found.values() for answer in each.values())
    tables = []
    for kind, heading in _KINDS.items():
        rows = []
        for title, answers in sorted(found.items(), key=lambda item: item[0].lower()):
            if next(iter(answers.values()))["kind"] != kind or _is_unbuilt(answers):
                continue
            cells = [_cell(answers.get(layout), reasons) for layout in LAYOUTS]
            rows.append(f"| {title} | {' | '.join(cells)} |")
        head = " | ".join(_HEADINGS[layout] for layout in LAYOUTS)
        tables.append(
            f"## {heading}\n\n| class | {head} |\n|---|{'---|' * len(LAYOUTS)}\n" + "\n".join(rows) + "\n"
        )
    unbuilt = [
        f"- {title}: {_plain(next(iter(answers.values()))['text'])}"
        for title, answers in sorted(found.items())
        if _is_unbuilt(answers)
    ]
    notes = [f"{number}. {text}" for text, number in reasons.items()]
    return (
        "# Models of transformers, by layout\n\n"
        "Every causal, masked and sequence-to-sequence language model of transformers "
        f"{transformers.__version__} (torch {torch.__version__.partition('+')[0]}), as tiny random models in fp64 with "
        "fp32 inside them widened, against one plain process: losses, norm, gradients (in a pipeline the first "
        "change of the weights) and weights after two steps. A figure is the largest relative error, and at most "
        f"{EXACT:.0e}; a refusal is an error before the first step, its reason below; an empty cell was not "
        "run (in ep 2, most often: a model without experts). Along ep experts are cut, under tp too; ep 2 has ZeRO 3. "
        "`python -m tests.foreign.sweep --help` tells how this page is made; `make soak` runs it.\n\n"
        f"{counts['exact']} exact, {counts['refused']} refused"
        + "".join(f", {counts[word]} {word}" for word in ("wrong", "error", "late") if counts[word])
        + ".\n\n"
        + "\n".join(tables)
        + "\n## Reasons\n\n"
        + "\n".join(notes)
        + "\n\n## Not tried\n\nNo tiny model of these gives a loss for tokens and labels alone:\n\n"
        + "\n".join(unbuilt)
        + "\n"
    )


def _is_unbuilt(answers: Mapping[str, Mapping[str, Any]]) -> bool:
    return all(answer["verdict"] == "unbuilt" for answer in answers.values())


def _cell(answer: Mapping[str, Any] | None, reasons: dict[str, int]) -> str:
    if answer is None:
        return ""
    if answer["verdict"] == "exact":
        return f"{answer['worst']:.0e}"
    number = reasons.setdefault(_plain(answer["text"]), len(reasons) + 1)
    word = answer["verdict"] if answer["verdict"] == "refused" else f"**{answer['verdict']}**"
    return f"{word} [{number}]"


def _plain(text: str) -> str:
    """A reason without what differs from class to class alike: its first sentence, numbers of layers starred."""
    first = re.split(r"; | \(", text.partition(": ")[2] or text)[0]
    first = re.sub(r"/\S+/", "", first)
    first = re.sub(r"(how to cut) an? \w+: it", r"\1 this class: it", first)
    first = re.sub(r"(model is) an? \w+ that", r"\1 of a class that", first)
    return re.sub(r"\.\d+(?=\.|\b)", ".*", first).replace("|", "/")[:200]
