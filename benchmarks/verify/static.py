"""Run the static part of the verification over the language models of transformers that can be cut along "tp".

    PYTHONPATH=src:. python -m benchmarks.verify.static [PART PARTS]
    PYTHONPATH=src:. python -m benchmarks.verify.static scale

Each class is built tiny (tests/foreign/models.py) and checked with tp 2, with and without sequence parallelism. A line
per class has the operations, the gradients, what is unknown and what is called a problem. Nothing is planted, so a
problem is a false alarm or a fault of the package. A class that cannot be cut is counted as refused. ``scale`` times
the static part of a model of 32 layers on 8 to 1,024 ranks.
"""

import sys
import time
import warnings
from collections import Counter
from typing import Any

import torch
from tests.foreign.models import batch, build, classes
from torch import nn

from shardwise.base.errors import ShardwiseError
from shardwise.models import Gpt, GptPolicy
from shardwise.verify.static import StaticPart, static_problems


def check(kind: str, name: str, model_type: str, sequence: bool) -> StaticPart | str:
    """Return the static part of one class, or the reason why it has none."""

    def make() -> nn.Module:
        return build(name, model_type)

    config: dict[str, Any] = {"mesh": {"tp": 2}, "tensor": {"sequence_parallel": sequence}}
    try:
        return static_problems(make, config, 2, batch(kind, 0))
    except ShardwiseError as error:
        return f"refused: {str(error).splitlines()[0][:110]}"
    except (
        Exception
    ) as error:  # a class that transformers itself cannot build or run from its tiny configuration
        return f"cannot run: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:90]}"


def scale() -> None:
    """Print the seconds that the static part takes on more and more ranks."""

    def make() -> nn.Module:
        with torch.device("meta"):
            return Gpt(GptPolicy(family="llama", layers=32, width=1024, heads=16, context=256, vocab=32000))

    ids = torch.zeros(1, 256, dtype=torch.int64)
    for stages, ranks in ((1, 8), (8, 64), (8, 1024)):
        config: dict[str, Any] = {
            "mesh": {"tp": 8, "pp": stages},
            "batch": {"accumulation": 16},
            "zero": {"stage": 1},
        }
        begun = time.perf_counter()
        found = static_problems(make, config, ranks, {"tokens": ids, "targets": ids})
        print(
            f"{ranks} ranks: {time.perf_counter() - begun:.1f} s, {found.operations} operations, {found.reduced} sums, "
            f"{len(found.unknown)} unknown, {len(found.problems)} problems",
            flush=True,
        )


def main() -> None:
    """Check every class and print the totals."""
    warnings.simplefilter("ignore")
    if sys.argv[1:] == ["scale"]:
        scale()
        return
    part, parts = (int(sys.argv[1]), int(sys.argv[2])) if len(sys.argv) == 3 else (0, 1)
    totals: Counter[str] = Counter()
    operations: Counter[str] = Counter()
    for kind, name, model_type in sorted(classes())[part::parts]:
        for sequence in (False, True):
            found = check(kind, name, model_type, sequence)
            if isinstance(found, str):
                totals[found.partition(":")[0]] += 1
                print(f"{name} sequence={sequence}: {found}", flush=True)
                continue
            gradients = sum(each.operation.startswith("gradient of ") for each in found.unknown)
            origins = len(found.unknown) - gradients
            totals.update(
                {
                    "checked": 1,
                    "operations": found.operations,
                    "operations without a rule": origins,
                    "operations with unknown results": found.unknown_results,
                    "gradients": found.gradients,
                    "gradients unknown": gradients,
                    "with problems": bool(found.problems),
                }
            )
            operations.update(each.operation for each in found.unknown if " of " not in each.operation)
            print(
                f"{name} sequence={sequence}: {found.operations} operations ({origins} without a rule, "
                f"{found.unknown_results} unknown), {found.gradients} gradients ({gradients} unknown), "
                f"{len(found.problems)} problems",
                *(f"    {each}" for each in found.problems[:2]),
                sep="\n",
                flush=True,
            )
    print(dict(totals))
    print("unknown operations:", operations.most_common(20))


if __name__ == "__main__":
    main()
