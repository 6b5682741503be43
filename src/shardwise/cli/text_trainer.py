"""Runs over text, and over any data and model of the user's own.

A microbatch of a language model is weighted by its tokens; if a batch has no known number of tokens, all count alike.
"""

import contextlib
import inspect
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.base.errors import ConfigError
from shardwise.base.words import printable
from shardwise.cli.profile import NO_PROFILE, ProfileRequest
from shardwise.cli.runs.run_folder import RunFolder
from shardwise.cli.trainer import ConversionProgress, OpenedData, Trainer
from shardwise.comm.world import World
from shardwise.config.auto import ResolvedConfig
from shardwise.config.run import RunConfig
from shardwise.data import DataPolicy, TextCorpus, build
from shardwise.data.masked import MaskedWindows
from shardwise.data.windows import TokenWindows
from shardwise.engine.step.end import StepResult
from shardwise.models import BertPolicy, Gpt, GptPolicy, TargetPolicy, flops_per_token
from shardwise.models import build as build_model
from shardwise.models.generate import generate
from shardwise.observe.flops import FlopsCounter, flops_text, measured_peak, mfu, peak_of, pf_days
from shardwise.observe.memory import available_bytes, taken
from shardwise.observe.metrics import StepRecord
from shardwise.parallel.expert.loads import summary_of

_log = logging.getLogger(__name__)

_IGNORED = -100
"""Target that no loss counts."""
_PROMPT_TOKENS = 16
_TEMPERATURE, _TOP_K = 0.8, 50
"""Settings of the generated sample at the end of a run."""


class TextTrainer(Trainer):
    """One rank's run over text, or with a model and data of the user's own."""

    record_kind = StepRecord

    def __init__(
        self,
        world: World,
        resolved: ResolvedConfig,
        folder: RunFolder,
        profile: ProfileRequest = NO_PROFILE,
    ) -> None:
        super().__init__(world, resolved, folder, profile)
        self.flops = 0.0
        self.val_loss: float | None = None
        self.peaks = self._peaks()
        self._counted: float | None = None
        """FLOPs of a step as counted in the first, per token if tokens are known; None before."""
        model = self.config.model
        # Counted as if not causal, as in the literature, so that figures compare.
        self.flops_per_token = flops_per_token(model, causal=False) if isinstance(model, GptPolicy) else None

    def open_data(self, config: RunConfig) -> OpenedData:
        """Open the corpus, and set the model's vocabulary from it, so that a checkpoint contains the model's shape."""
        assert isinstance(config.data, DataPolicy), "clicks have a trainer of their own"
        reading = ConversionProgress("tokenising") if self.world.rank == 0 else None
        corpus: TextCorpus = build(config.data, context_of(config, config.data), self.folder.cache, reading)
        self.tokenizer, self._train = corpus.tokenizer, corpus.train
        if isinstance(config.model, GptPolicy):
            config = config.model_copy(update={"model": config.model.resolved(corpus.vocab_size)})
        train, held_out, model = corpus.train, corpus.validation, config.model
        if isinstance(model, BertPolicy):
            config, mask = with_mask(config, model, corpus)
            train = MaskedWindows(train, mask, model.masked)
            held_out = None if held_out is None else MaskedWindows(held_out, mask, model.masked)
        return OpenedData(config, train, held_out, corpus.fingerprint())

    def make_model(self) -> nn.Module:
        """Make our model without weights, or the user's as it comes."""
        model = self.config.model
        if isinstance(model, GptPolicy | BertPolicy):
            with torch.device("meta"):
                return build_model(model)
        assert isinstance(model, TargetPolicy), "a click-through model reads clicks"
        made = build_model(model, seed=self.config.train.seed)
        check_documents(self.config, made)
        return made

    def weights(self, batches: Sequence[Any]) -> list[float] | None:
        """Return the number of tokens of each microbatch."""
        tokens = [tokens_in(batch) for batch in batches]
        return None if any(count is None for count in tokens) else [float(count or 0) for count in tokens]

    def record(self, result: StepResult, step_s: float, is_weighted: bool) -> StepRecord:
        """Return the row of metrics.csv."""
        tokens = int(result.weight) if is_weighted else None
        flops = self._flops_of(tokens)
        self.flops += flops or 0.0
        experts = summary_of(self.engine.expert_tallies().values())
        return StepRecord(
            step=result.step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=result.lr,
            tokens=tokens,
            tokens_per_s=None if tokens is None else tokens / step_s,
            step_s=step_s,
            **taken(self.world.device)._asdict(),
            flops=flops,
            pf_days=None if flops is None else pf_days(self.flops),
            mfu=None if flops is None else mfu(flops, step_s, self.peaks),
            loss_scale=self.engine.loss_scale,
            **({} if experts is None else experts._asdict()),
        )

    def _peaks(self) -> float | None:
        """Return the FLOP/s of all devices together, and log how they were measured."""
        world, dtype = self.world, self.config.precision.product_dtype or torch.float32
        peak = peak_of(world.device, dtype)
        if peak is not None or world.device.type != "cpu" or world.rank != 0:
            return None if peak is None else peak * world.size
        peak = measured_peak(dtype)
        _log.info(
            "MFU: of %s/s, %d times what a matrix product reached here in %s just now, under the load of the moment",
            flops_text(peak * world.size),
            world.size,
            str(dtype).removeprefix("torch."),
        )
        return peak * world.size

    def _flops_of(self, tokens: int | None) -> float | None:
        """Return the FLOPs of a step, by our GPT's formula or as counted in the first step."""
        if self.flops_per_token is not None:
            return None if tokens is None else float(tokens * self.flops_per_token)
        return None if self._counted is None else self._counted * (1 if tokens is None else tokens)

    def train_step(self, batches: list[Any], weights: Sequence[float] | None) -> StepResult:
        """Run one step of the engine; for a model without a formula, all ranks count the FLOPs of the first step."""
        has_formula = self.flops_per_token is not None or self.config.compile.scope != "none"
        if has_formula or self._counted is not None:
            return super().train_step(batches, weights)
        with FlopsCounter() as counter:
            result = super().train_step(batches, weights)
        key = f"trainer/{self.world.next_engine()}/flops"
        self.world.post(key, str(counter.flops))
        together = sum(map(int, self.world.collect(key, self.config.comm.limit_s)))
        self._counted = float(together if weights is None else together / max(result.weight, 1.0))
        return result

    def evaluate(self) -> float:
        """Compute the mean loss over the held-out data, store it in ``val_loss`` and return it."""
        self.val_loss = self.engine.evaluate(self._weighted_validation())
        return self.val_loss

    def results(self) -> dict[str, float]:
        """Return the mean loss of the last evaluation."""
        assert self.val_loss is not None, "evaluated before"
        return {"loss": self.val_loss}

    def with_evaluation(self, record: Any) -> StepRecord:
        """Return the record with the validation loss."""
        found: StepRecord = record._replace(val_loss=self.val_loss)
        return found

    def _weighted_validation(self) -> Iterator[tuple[Any, float]]:
        for batch, samples in self.validation_batches():
            counted = self.engine.weighing.of_batch(batch)
            yield batch, float(samples if counted is None or samples == 0 else counted)

    def state(self) -> dict[str, Any]:
        """Return the FLOPs so far."""
        return {"flops": self.flops}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the FLOPs so far."""
        self.flops = float(state["flops"])

    def last_words(self) -> list[str]:
        """Return lines on the loss, and text that the model generates."""
        said = []
        if self.val_loss is not None:
            is_bytes = self.tokenizer is not None and self.tokenizer.name == "bytes"
            is_bytes = is_bytes and not isinstance(
                self.config.model, BertPolicy
            )  # whose loss is that of masked tokens
            bits = f", {self.val_loss / math.log(2):.4f} bits per byte" if is_bytes else ""
            said.append(f"validation loss {self.val_loss:.4f}{bits}")
        sample = self.sample()
        if sample is not None:
            if self.world.rank == 0:
                self.folder.sample.write_text(sample, encoding="utf-8")
            said.append(f"sample:\n{printable(sample)}\n")
        return said

    def sample(self) -> str | None:
        """Return the text that the model generates after the prompt, the same on every rank; None for other models."""
        train, tokenizer = self.config.train, self.tokenizer
        if not isinstance(self.engine.module, Gpt) or tokenizer is None or train.sample_tokens == 0:
            return None
        given = None if train.sample_prompt is None else tokenizer.encode(train.sample_prompt)
        prompt = torch.tensor([given or self._first_tokens()], device=self.world.device)
        context = self.engine.module.policy.context
        with self._callable_model() as model:
            tokens = generate(
                model, prompt, train.sample_tokens, _TEMPERATURE, _TOP_K, train.seed, context=context
            )
        return tokenizer.decode(tokens[0].tolist())

    def _first_tokens(self) -> list[int]:
        """Return the first tokens of the held-out text, else of the training text, as a prompt of their kind."""
        text = self._train if self.validation is None else self.validation
        first = text[0] if isinstance(text, TokenWindows) else {"tokens": [0]}
        return [int(token) for token in first["tokens"][:_PROMPT_TOKENS]]

    @contextlib.contextmanager
    def _callable_model(self) -> Iterator[Callable[..., Tensor]]:
        """Yield the model for generating: gathered once if it fits, else Unit by Unit for every token."""
        fits = not self.engine.agree(not self.gathered_model_fits())
        self.engine.eval()
        try:
            with self.engine.gathered() if fits else contextlib.nullcontext():
                yield self._call
        finally:
            self.engine.train()

    def _call(self, tokens: Tensor, **given: Any) -> Tensor:
        """Call the model on any mesh: all ranks of a pipeline get the output of its last stage."""
        (logits,) = self.engine.predict([{"tokens": tokens, **given}])
        return logits

    def gathered_model_fits(self) -> bool:
        """Return whether this rank's compute weights fit beside the memory in use, with as much again to spare."""
        dtype = self.config.precision.compute_dtype or torch.float32
        sharers = self.world.local_size if self.world.device.type == "cpu" else 1
        elements = sum(unit.elements for unit in self.engine.plan.units)
        available = available_bytes(self.world.device)
        return available is None or 2 * sharers * elements * dtype.itemsize <= available


def with_mask(config: RunConfig, model: BertPolicy, corpus: TextCorpus) -> tuple[RunConfig, int]:
    """Return the configuration with the vocabulary of a model of masked text, and the masking token.

    The masking token is the first behind the tokenizer's.

    Args:
        config: The configuration.
        model: Keys of the model.
        corpus: The text.
    """
    assert corpus.vocab_size is not None, "a rule of the configuration: a bert reads text of ours"
    return config.model_copy(update={"model": model.resolved(corpus.vocab_size)}), corpus.vocab_size


def check_documents(config: RunConfig, model: nn.Module) -> None:
    """Check that a model of the user's own takes documents if the data has them.

    Raises:
        ConfigError: if its forward has no argument ``documents``.
    """
    if not getattr(config.data, "documents", False):
        return
    parameters = inspect.signature(model.forward).parameters
    if "documents" not in parameters and all(
        each.kind is not each.VAR_KEYWORD for each in parameters.values()
    ):
        raise ConfigError(
            f"data.documents: the forward of {type(model).__name__} has no argument 'documents' [B, T], so its tokens "
            "would see other documents; give it one, or leave data.documents out"
        )


def context_of(config: RunConfig, data: DataPolicy) -> int:
    """Return the number of tokens per sample, which only text needs.

    Args:
        config: The configuration.
        data: Keys of the data.

    Raises:
        ConfigError: if the model does not give the number.
    """
    if isinstance(config.model, GptPolicy | BertPolicy):
        return config.model.context
    given = config.model.keywords().get("context") if isinstance(config.model, TargetPolicy) else None
    if isinstance(given, int):
        return given
    if data.target is not None:
        return 0
    raise ConfigError(
        "model: text is cut into samples of model.context tokens, and this model does not give that number; "
        "set model.context, which is handed to the target too, or bring a dataset with data.target"
    )


def tokens_in(batch: Any) -> int | None:
    """Return the targets that count in a language model's batch; None for a batch of another kind."""
    targets = batch.get("targets") if isinstance(batch, dict) else None
    if not isinstance(targets, Tensor) or targets.is_floating_point():
        return None
    return int((targets != _IGNORED).sum())
