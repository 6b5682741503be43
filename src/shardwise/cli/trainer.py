"""The training loop of ``shardwise train`` on one rank.

    made        data, model on meta, engine, loader
    each step   batches -> engine.train_step -> evaluation? -> one record -> checkpoint?

A signal is acted on between two steps: the ranks learn of it in the reduction that every step has anyway, so that all
stop after the same one.
"""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shardwise
from shardwise.cli.profile import StepProfile
from shardwise.cli.run_folder import RunFolder
from shardwise.comm.world import World
from shardwise.config.auto import Resolved
from shardwise.config.run import RunConfig
from shardwise.data import Corpus, Loader, build, evaluation_batches
from shardwise.engine.engine import Engine
from shardwise.engine.step import StepResult
from shardwise.models import Gpt, GptPolicy, flops_per_token
from shardwise.models import build as build_model
from shardwise.models.generate import generate
from shardwise.observe.flops import mfu, peak_of, pf_days
from shardwise.observe.memory import available_bytes, in_use_bytes
from shardwise.observe.metrics import Sink, StepRecord
from shardwise.observe.progress import bytes_text, count_text
from shardwise.plan.errors import ConfigError, DataError
from shardwise.plan.timeline import Timeline

_log = logging.getLogger(__name__)
_IGNORED = -100
"""Target that no loss counts."""
_TOKENISING_LINE_S = 5.0
_TEMPERATURE, _TOP_K = 0.8, 50
"""How the sample at the end is drawn."""


# Parts -------------------------------------------------------------------------------------------------------------


def _context_of(config: RunConfig) -> int:
    """Tokens per sample; only text asks for it."""
    if isinstance(config.model, GptPolicy):
        return config.model.context
    given = config.model.keywords().get("context") if config.model is not None else None
    if isinstance(given, int):
        return given
    if config.data.target is not None:
        return 0
    raise ConfigError(
        "model: text is cut into samples of model.context tokens, and this model does not say it; "
        "set model.context, which is handed to the target too, or bring a dataset with data.target"
    )


class _Tokenising:
    """Says how far it is, every few seconds; nothing for a text that is done before that."""

    def __init__(self) -> None:
        self._said_at = time.monotonic()

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        if time.monotonic() - self._said_at >= _TOKENISING_LINE_S:
            self._said_at = time.monotonic()
            _log.info("tokenising: %.0f%% of %s", 100 * done_bytes / total_bytes, bytes_text(total_bytes))


def _open_data(config: RunConfig, world: World, folder: RunFolder) -> Corpus:
    """The corpus, the same on every rank."""
    corpus = build(config.data, _context_of(config), folder.cache, _Tokenising() if world.rank == 0 else None)
    if world.size > 1:
        key = f"trainer/{world.next_engine()}/data"  # a key of its own: what was once posted stays
        world.post(key, corpus.fingerprint() or "")
        told = world.collect(key, config.checkpoint.timeout_s)
        others = [rank for rank, fingerprint in enumerate(told) if fingerprint != told[0]]
        if others:
            raise DataError(
                f"data: ranks {others} read other text than rank 0; every rank must see the same files, "
                f"and data.cache, if given, must not hold what was made of another text"
            )
    return corpus


def _with_vocabulary(config: RunConfig, corpus: Corpus) -> RunConfig:
    """The configuration with the model's shape complete, so that a checkpoint can say what it holds."""
    if not isinstance(config.model, GptPolicy):
        return config
    return config.model_copy(update={"model": config.model.resolved(corpus.vocab_size)})


def _make_model(config: RunConfig) -> nn.Module:
    """On meta where the model allows it: the engine then draws each weight on the rank that keeps it."""
    assert config.model is not None, "Request.load refuses a run without a model"
    if isinstance(config.model, GptPolicy):
        with torch.device("meta"):
            return build_model(config.model)
    return build_model(config.model, seed=config.train.seed)


def tokens_in(batch: Any) -> int | None:
    """Targets that count in a language model's batch; None where the batch is of another kind."""
    targets = batch.get("targets") if isinstance(batch, dict) else None
    if not isinstance(targets, Tensor) or targets.is_floating_point():
        return None
    return int((targets != _IGNORED).sum())


def _weights(batches: Sequence[Any]) -> list[float] | None:
    """Batches count by their tokens; where they have none, alike."""
    tokens = [tokens_in(batch) for batch in batches]
    return None if any(count is None for count in tokens) else [float(count or 0) for count in tokens]


# The run -----------------------------------------------------------------------------------------------------------


class Trainer:
    """One rank's run."""

    def __init__(self, world: World, resolved: Resolved, folder: RunFolder, profile_steps: int = 0) -> None:
        self.world, self.folder = world, folder
        self.profile_steps = profile_steps
        self.mesh = resolved.mesh
        self.corpus = _open_data(resolved.config, world, folder)
        self.config = _with_vocabulary(resolved.config, self.corpus)
        self.engine: Engine = shardwise.initialize(_make_model(self.config), self.config, world=world)
        registry = self.engine.plan.registry
        self.parameters = sum(math.prod(info.shape) for info in registry.of_kind("parameter"))
        batch = self.config.batch
        assert batch.global_size and batch.micro_size, "Request.load refuses a run without a batch size"
        self.micro_size = batch.micro_size
        self.dp_index, self.dp_size = self.mesh.index("dp", world.rank), self.mesh.size("dp")
        self.loader = Loader(
            self.corpus.train,
            global_batch=batch.global_size,
            micro_batch=batch.micro_size,
            dp_index=self.dp_index,
            dp_size=self.dp_size,
            seed=self.config.train.seed,
            shuffle=self.config.data.shuffle,
            workers=self.config.data.workers,
        )
        self.flops = 0.0
        self.saved_step: int | None = None
        self.val_loss: float | None = None
        self.timelines: tuple[Timeline, Timeline] | None = None
        """The last step of a pipeline, predicted and measured."""
        dtype = self.config.precision.compute_dtype
        peak = None if dtype is None else peak_of(world.device, dtype)
        self.peaks = None if peak is None else peak * world.size
        model = self.config.model
        # As if not causal: so the literature counts, and so figures compare.
        self.flops_per_token = flops_per_token(model, causal=False) if isinstance(model, GptPolicy) else None

    def description(self) -> str:
        """The model, how it is cut, and what it takes, in a line."""
        config = self.config
        said = [f"{count_text(self.parameters)} parameters", f"ZeRO-{config.zero.stage}"]
        if self.mesh.tp > 1:
            said.append(f"tp {self.mesh.tp}" + " with sequence parallelism" * config.tensor.sequence_parallel)
        if self.mesh.pp > 1:
            here = range(self.mesh.index("pp", self.world.rank), self.stages, self.mesh.pp)
            said.append(
                f"{config.pipeline.schedule} with {config.batch.accumulation} microbatches through {self.stages} "
                f"stages, here {', '.join(map(str, here))}"
            )
        if config.recompute.scope != "none":
            said.append(f"recompute {config.recompute.scope}")
        state = self.engine.state_bytes()
        return ", ".join(said) + f"; model state {bytes_text(sum(state.values()))} on this rank"

    @property
    def stages(self) -> int:
        """Pipeline stages of the whole model."""
        return self.mesh.pp * self.config.pipeline.interleave

    def go_on_from(self, start: Path) -> None:
        """Load the step at ``start``, or the newest whole one in it, with the position in the data."""
        state = self.engine.load(start)
        if state is None:
            return
        self.flops = float(state["flops"])
        self.loader.load_state(state["loader"])
        if self.folder.checkpoints.resolve() in (start.resolve(), start.resolve().parent):
            self.saved_step = self.engine.step_count
        _log.info("going on from step %d of %s", self.engine.step_count, start)

    def run(self, sink: Sink) -> bool:
        """All steps that remain; False where a signal ended them early."""
        trace = self.folder.profile / f"rank_{self.world.rank:05d}.json"
        profile = StepProfile(trace, self.profile_steps, self.world.device)
        try:
            while self.engine.step_count < self.config.train.steps:
                profile.before_step()
                record = self.step()
                profile.after_step()
                sink.write(record)
                if self.engine.stop_requested:
                    self.save()
                    return False
                every = self.config.checkpoint.every
                if every is not None and record.step % every == 0:
                    self.save()
        finally:
            profile.close()
        self.save()
        return True

    def step(self) -> StepRecord:
        """One optimizer step and, where it is due, an evaluation."""
        started = time.perf_counter()
        batches = self.loader.step_batches()
        weights = _weights(batches)
        result = self.engine.train_step(batches, weights)
        step_s = time.perf_counter() - started
        if result.step == self.config.train.steps or self.engine.stop_requested:
            self.timelines = self.engine.timeline()  # before an evaluation, which is another walk
        tokens = None if weights is None else int(result.weight)
        record = self.record(result, step_s, tokens)
        train = self.config.train
        is_due = train.eval_every and result.step % train.eval_every == 0
        if is_due or result.step == train.steps:
            self.evaluate()
            record = record._replace(val_loss=self.val_loss)
        return record

    def record(self, result: StepResult, step_s: float, tokens: int | None) -> StepRecord:
        """The row of metrics.csv."""
        flops = None
        if tokens is not None and self.flops_per_token is not None:
            flops = float(tokens * self.flops_per_token)
            self.flops += flops
        return StepRecord(
            step=result.step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=result.lr,
            tokens=tokens,
            tokens_per_s=None if tokens is None else tokens / step_s,
            step_s=step_s,
            memory=in_use_bytes(self.world.device),
            flops=flops,
            pf_days=None if flops is None else pf_days(self.flops),
            mfu=None if flops is None else mfu(flops, step_s, self.peaks),
        )

    def evaluate(self) -> None:
        """Mean loss over the held-out data, into ``val_loss``."""
        if self.corpus.validation is not None:
            self.val_loss = self.engine.evaluate(self._validation())

    def _validation(self) -> Iterator[tuple[Any, float]]:
        batches = evaluation_batches(
            self.corpus.validation,
            self.dp_index,
            self.dp_size,
            self.micro_size,
            workers=self.config.data.workers,
            samples=self.config.data.validation_samples,
            seed=self.config.train.seed,
        )
        for batch, samples in batches:
            tokens = tokens_in(batch)
            yield batch, float(samples if tokens is None or samples == 0 else tokens)

    def save(self) -> None:
        """Save this step, unless it lies in the run folder already."""
        if self.saved_step != self.engine.step_count:
            trainer = {
                "loader": self.loader.state(),
                "flops": self.flops,
                "config": self.config.model_dump(mode="json", exclude_none=True),
            }
            self.engine.save(self.folder.checkpoints, trainer)
            self.saved_step = self.engine.step_count

    def sample(self) -> str | None:
        """What the model writes after the prompt; None where it writes no text. The same on every rank."""
        train, tokenizer = self.config.train, self.corpus.tokenizer
        if not isinstance(self.engine.module, Gpt) or tokenizer is None or train.sample_tokens == 0:
            return None
        prompt = torch.tensor([tokenizer.encode(train.sample_prompt) or [0]], device=self.world.device)
        context = self.engine.module.policy.context
        with self._callable_model() as model:
            tokens = generate(
                model, prompt, train.sample_tokens, _TEMPERATURE, _TOP_K, train.seed, context=context
            )
        return tokenizer.decode(tokens[0].tolist())

    @contextlib.contextmanager
    def _callable_model(self) -> Iterator[Callable[..., Tensor]]:
        """The model to generate with: gathered once where that fits, else Unit by Unit for every token."""
        fits = not self.engine.agree(not self.gathered_model_fits())
        self.engine.eval()
        try:
            with self.engine.gathered() if fits else contextlib.nullcontext():
                yield self._call
        finally:
            self.engine.train()

    def _call(self, tokens: Tensor, **given: Any) -> Tensor:
        """The model on every mesh: a pipeline's ranks all get what its last stage computes."""
        (logits,) = self.engine.predict([{"tokens": tokens, **given}])
        return logits

    def gathered_model_fits(self) -> bool:
        """The weights that this rank computes with fit beside what is held now, with as much again to spare."""
        dtype = self.config.precision.compute_dtype or torch.float32
        sharers = self.world.local_size if self.world.device.type == "cpu" else 1
        elements = sum(unit.elements for unit in self.engine.plan.units)
        available = available_bytes(self.world.device)
        return available is None or 2 * sharers * elements * dtype.itemsize <= available
