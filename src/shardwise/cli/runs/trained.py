"""Opens a trained model from the path of a run, of its checkpoints or of one step."""

from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardwise.base.errors import MismatchError, UsageError
from shardwise.checkpoint import Checkpoints, FlatSlice, Manifest, StepSummary, TensorPieces
from shardwise.cli.runs.chosen_step import NEWEST, step_at
from shardwise.config.run import RunConfig
from shardwise.data import DataPolicy, Tokenizer, load_tokenizer
from shardwise.engine.state.saved_state import SavedState
from shardwise.models import Gpt, GptPolicy, TargetPolicy
from shardwise.models.huggingface import joined_shape, parts_of


class TrainedModel(NamedTuple):
    """A model with its weights, and the tokenizer for its text."""

    model: Gpt
    tokenizer: Tokenizer
    step: int


def gpt_of(step: StepSummary) -> tuple[GptPolicy, RunConfig]:
    """Return the model's keys in a step of ``shardwise train``, and the whole configuration.

    Raises:
        UsageError: if the step contains no configuration or no GPT.
        MismatchError: if the configuration and the weights differ.
    """
    user = SavedState.of(step.trainer, step.path).user
    if "config" not in user:
        raise UsageError(
            f"{step.path} was saved by a loop of your own and does not say which model it holds; "
            f"its weights are plain safetensors in {step.path / 'model'}"
        )
    config = RunConfig.parse(user["config"], str(step.path / "trainer.json"))
    if not isinstance(config.model, GptPolicy):
        raise UsageError(
            f"{step.path} holds {_described(config.model)}, which does not generate text; "
            f"its weights are plain safetensors in {step.path / 'model'}"
        )
    _check_shapes(config.model, step)
    return config.model, config


def _check_shapes(policy: GptPolicy, step: StepSummary) -> None:
    """Check that the configuration describes the model that is stored; raise MismatchError if not.

    The check comes before the model is built, because a configuration may request a million layers.
    """
    stored = {row.name: row.shape for row in step.tensors if row.kind == "weight"}
    for name, others in (step.aliases or {}).items():
        stored.update(dict.fromkeys(others, stored.get(name, ())))
    layers = len({name.split(".")[1] for name in stored if name.startswith("blocks.")})
    wrong = [] if layers == policy.layers else [f"layers is {policy.layers}, stored are {layers}"]
    wrong += [
        f"{name} is {list(joined_shape(parts))} by the configuration, stored is {list(stored.get(name, ()))}"
        for name, parts in ({} if wrong else parts_of(policy.resolved())).items()
        if stored.get(name) != joined_shape(parts)
    ]
    if wrong:
        raise MismatchError(
            f"{step.path}: trainer.json describes another model than the weights are of: {'; '.join(wrong[:3])}"
            + (f"; and {len(wrong) - 3} more" if len(wrong) > 3 else "")
        )


def tokenizer_of(config: RunConfig) -> str:
    """Return ``data.tokenizer`` of a language model's run."""
    assert isinstance(config.data, DataPolicy), "a rule of the configuration: a gpt reads text"
    return config.data.tokenizer


def _described(model: Any) -> str:
    if model is None:
        return "no model that its configuration names"
    return "a model of your own (model.target)" if isinstance(model, TargetPolicy) else f"a {model.name}"


def open_trained(path: Path, device: torch.device, which: str = NEWEST) -> TrainedModel:
    """Load the model of a step, checking every byte against its checksum.

    Args:
        path: Path of a run, of its checkpoints or of one step.
        device: Device of the model.
        which: Step of the run, as for :func:`step_at`.
    """
    step = step_at(path, which)
    policy, config = gpt_of(step)
    with torch.device("meta"):
        model = Gpt(policy)
    # Half precision is slow on a processor and no better: the weights have the same values in any wider type.
    dtype = torch.float32 if device.type == "cpu" else config.precision.compute_dtype or torch.float32
    model = model.to(dtype).to_empty(device=device).eval()
    _fill(model, step.path)
    return TrainedModel(model, load_tokenizer(tokenizer_of(config)), step.step)


def _fill(model: Gpt, step: Path) -> None:
    items = []
    for name, parameter in model.named_parameters():
        flat = parameter.data.view(-1)
        items.append(
            TensorPieces(
                "weight", name, tuple(parameter.shape), parameter.dtype, [FlatSlice(0, flat.numel(), flat)]
            )
        )

    def choose(manifest: Manifest) -> list[TensorPieces]:
        return items

    Checkpoints(step.parent).load(choose, path=step)
