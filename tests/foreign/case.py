"""One class in one layout, beside one plain process.

Two optimizer steps of two pieces each. Compared are, relative to what the plain loop has (the measure of
``engine/plain.py``, with a floor for parameters whose true gradient is nothing): the loss of both steps, the norm, the
gradients (or, in a pipeline, the first step's change of the weights), the weights in the end.
"""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import shardwise
from shardwise.base.errors import CommError, ConfigError, MeshError, PlanError, UsageError
from shardwise.parallel.expert.stacks import find_stacks
from tests.foreign.models import batch, build
from tests.foreign.wide import wide

EXACT, FLOOR = 1e-9, 1e-4
LR, CLIP, STEPS, PIECES = 0.5, 1.0, 2, 2
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero3": (2, {"zero": {"stage": 3}}),
    "pp2": (2, {"mesh": {"pp": 2}, "batch": {"accumulation": PIECES}}),
    "tp2": (2, {"mesh": {"tp": 2}, "batch": {"accumulation": PIECES}}),
    "tp2pp2": (4, {"mesh": {"tp": 2, "pp": 2}, "batch": {"accumulation": PIECES}}),
    "ep2": (2, {"zero": {"stage": 3}, "mesh": {"ep": 2}}),
}
"""Ranks and configuration by name."""
OF_EXPERTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ep2-zero0": (2, {"mesh": {"ep": 2}}),
    "ep2-zero1": (2, {"mesh": {"ep": 2}, "zero": {"stage": 1}}),
    "ep2-zero2": (2, {"mesh": {"ep": 2}, "zero": {"stage": 2}}),
    "ep2-recompute": (2, {"mesh": {"ep": 2}, "zero": {"stage": 3}, "recompute": "full"}),
    "tp2-ep2": (2, {"mesh": {"tp": 2, "ep": 2}, "batch": {"accumulation": PIECES}}),
    "tp2-etp2": (2, {"mesh": {"tp": 2, "etp": 2}, "batch": {"accumulation": PIECES}}),
    "dp2-tp2-ep4": (4, {"mesh": {"tp": 2, "ep": 4}, "zero": {"stage": 3}}),
    "dp2-tp2-ep2-etp2": (4, {"mesh": {"tp": 2, "ep": 2, "etp": 2}, "zero": {"stage": 2}}),
    "pp2-ep2": (4, {"mesh": {"pp": 2, "ep": 2}, "zero": {"stage": 1}, "batch": {"accumulation": 1}}),
    "pp2-tp2-ep2": (4, {"mesh": {"pp": 2, "tp": 2, "ep": 2}, "batch": {"accumulation": PIECES}}),
}
"""Further ones for models with experts."""
TILED = {
    f"{layout}-{what}": (size, config | {"tiles": {what: 3}})
    for layout, (size, config) in LAYOUTS.items()
    for what in ("mlp", "logits")
}
"""With feed-forward parts, or head and loss, by tiles of tokens."""

REFUSALS = (PlanError, UsageError, ConfigError, MeshError)


def loss_of(model: nn.Module, given: Mapping[str, Tensor]) -> Tensor:
    """What is trained, alike in the plain loop and in a layout."""
    with wide():
        loss: Tensor = model(**given).loss
    return loss


def piece(kind: str, step: int, index: int) -> dict[str, Tensor]:
    """Piece ``index`` of a step's batch."""
    return batch(kind, step * PIECES + index)


def plain(kind: str, name: str, model_type: str, folder: Path, more: Mapping[str, Any]) -> None:
    """Write what one process does: ``truth.safetensors`` and ``truth.json``."""
    with wide():
        model = build(name, model_type, **more)
    losses, norms = [], []
    tensors: dict[str, Tensor] = {}
    parameters = dict(model.named_parameters())
    for step in range(STEPS):
        model.zero_grad()
        total = 0.0
        addends = {key: torch.zeros_like(value) for key, value in parameters.items()}
        sums = {key: torch.zeros_like(value) for key, value in parameters.items()}
        for index in range(PIECES):
            model.zero_grad()
            loss = loss_of(model, piece(kind, step, index)) / PIECES
            loss.backward()
            total += float(loss.detach())
            for key, parameter in parameters.items():
                if parameter.grad is not None:
                    addends[key] += parameter.grad.abs()
                    sums[key] += parameter.grad
        norm = float(torch.stack([each.norm() for each in sums.values()]).norm())
        losses.append(total)
        norms.append(norm)
        with torch.no_grad():
            for key, parameter in parameters.items():
                parameter -= LR * min(1.0, CLIP / (norm + 1e-6)) * sums[key]
        if step == 0:
            tensors |= {f"gradient {key}": value for key, value in sums.items()}
            tensors |= {f"addends {key}": value for key, value in addends.items()}
    tensors |= {f"weight {key}": value.detach() for key, value in parameters.items()}
    again = sum(float(loss_of(model, piece(kind, 0, 0)).detach()) for _ in range(1))
    once_more = float(loss_of(model, piece(kind, 0, 0)).detach())
    facts = {
        "losses": losses,
        "norms": norms,
        "parameters": sum(parameter.numel() for parameter in parameters.values()),
        "draws": again != once_more,
        "experts": any(find_stacks(model)),
    }
    save_file(
        {key: value.contiguous().clone() for key, value in tensors.items()}, folder / "truth.safetensors"
    )
    (folder / "truth.json").write_text(json.dumps(facts))


def laid_out(
    world: Any, kind: str, name: str, model_type: str, layout: str, folder: Path, more: Mapping[str, Any]
) -> dict[str, Any]:
    """The verdict of this rank: {"verdict": exact | wrong | refused | error, "worst": ..., "text": ...}."""
    steps_done = 0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with wide():
                model = build(name, model_type, **more)
            config = {
                "optimizer": {"type": "sgd", "lr": LR},
                "max_grad_norm": CLIP,
                "comm": {"timeout_s": 60.0},
                **(LAYOUTS | OF_EXPERTS | TILED)[layout][1],
            }
            if "recompute" in layout:  # what runs again runs inside torch, past the mode around the pass
                for block in model.model.layers:  # type: ignore[union-attr]
                    block.forward = wide()(block.forward)  # type: ignore[union-attr]
            before = {key: value.detach().clone() for key, value in model.named_parameters()}
            engine = shardwise.initialize(model, config, world=world, loss=loss_of)
            found: dict[str, Any] = {"losses": [], "norms": []}
            mine = range(engine.dp_index, PIECES, engine.dp_size)
            for step in range(STEPS):
                if "pp" in layout:
                    result = engine.train_step([piece(kind, step, i) for i in mine])
                else:
                    for index in mine:
                        engine.backward(engine(piece(kind, step, index)))
                        if step == 0 and index == mine[-1]:
                            found["gradients"] = engine.gradients()
                        result = engine.step()
                assert result is not None
                found["losses"].append(result.loss)
                found["norms"].append(result.grad_norm)
                steps_done += 1
                if step == 0 and "gradients" not in found:
                    factor = LR * min(1.0, CLIP / (result.grad_norm + 1e-6))
                    state = engine.state_dict()
                    found["gradients"] = {key: (before[key] - state[key]) / factor for key in before}
            state = engine.state_dict()
            found["weights"] = {key: state[key] for key in before}
            engine.close()
    except REFUSALS as error:
        return {"verdict": "refused" if steps_done == 0 else "error", "text": _line(error)}
    except CommError as error:
        return {"verdict": "left alone", "text": _line(error)}
    except Exception as error:
        return {"verdict": "error", "text": _line(error)}
    return _judged(found, folder)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _judged(found: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    facts = json.loads((folder / "truth.json").read_text())
    truth = load_file(folder / "truth.safetensors")
    scale = facts["norms"][0]
    errors = {}
    for kind in ("losses", "norms"):
        for step, (got, wanted) in enumerate(zip(found[kind], facts[kind], strict=True)):
            errors[f"{kind} {step}"] = abs(got - wanted) / abs(wanted)
    for key in truth:
        kind, _, name = key.partition(" ")
        if kind == "gradient":
            size = max(float(truth[f"addends {name}"].norm()), FLOOR * scale)
            got = found["gradients"].get(name, torch.zeros_like(truth[key]))
            errors[key] = float((got - truth[key]).norm()) / size
        elif kind == "weight":
            errors[key] = float(
                (found["weights"][name] - truth[key]).norm() / truth[key].norm().clamp_min(1e-12)
            )
    where, worst = max(errors.items(), key=lambda item: float("inf") if item[1] != item[1] else item[1])
    good = worst <= EXACT
    return {"verdict": "exact" if good else "wrong", "worst": worst, "text": "" if good else where}
