"""One rank of ``shardwise train``: data, model, engine, the loop over steps, and the last words.

    prepare     world, data, model on meta, engine, checkpoint to go on from
    each step   batches -> engine.train_step -> evaluation? -> one record -> checkpoint?
    the end     checkpoint, validation loss, a sample, where everything is

Every rank runs this; rank 0 alone prints and writes metrics. A signal is acted on between two steps: the ranks learn
of it in the reduction that every step has anyway, so that all stop after the same one.
"""

import json
import logging
import math
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

import shardwise
from shardwise.cli.profile import StepProfile
from shardwise.cli.run_folder import RunFolder
from shardwise.cli.stop import StopFlag
from shardwise.comm.world import World, join
from shardwise.config.auto import Resolved, resolve
from shardwise.config.run import RunConfig, load
from shardwise.data import Corpus, Loader, build, evaluation_batches
from shardwise.engine.engine import Engine
from shardwise.engine.step import StepResult
from shardwise.launch.environment import is_in_job
from shardwise.models import Gpt, GptPolicy, flops_per_token
from shardwise.models import build as build_model
from shardwise.models.generate import generate
from shardwise.observe.flops import mfu, peak_of, pf_days
from shardwise.observe.log import rank_log
from shardwise.observe.memory import in_use_bytes
from shardwise.observe.metrics import StepRecord
from shardwise.observe.progress import ConsoleHandler, bytes_text, count_text, open_progress
from shardwise.observe.sinks import Sinks, open_sinks
from shardwise.plan.errors import ConfigError, DataError

_log = logging.getLogger("shardwise.cli.trainer")  # not __name__: a rank runs this file as __main__
_IGNORED = -100
"""Target that no loss counts."""
_TOKENISING_LINE_S = 5.0


@dataclass(frozen=True)
class Request:
    """What the user asked for on the command line."""

    config: str
    overrides: tuple[str, ...] = ()
    resume: str = "auto"
    profile_steps: int = 0
    ranks: int | None = None

    def to_json(self) -> str:
        """For the ranks' command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Request":
        """Read back what :meth:`to_json` wrote."""
        given = json.loads(text)
        return cls(**given | {"overrides": tuple(given["overrides"])})

    def command(self) -> str:
        """The command that goes on with this run."""
        words = ["shardwise", "train", self.config]
        words += ["--ranks", str(self.ranks)] if self.ranks is not None else []
        words += [word for override in self.overrides for word in ("--set", override)]
        return shlex.join(words)


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


def _tokenising(done_bytes: int, total_bytes: int) -> None:
    _log.info("tokenising: %.0f%% of %.1f MiB", 100 * done_bytes / max(1, total_bytes), total_bytes / 2**20)


class _Rarely:
    """Calls ``_tokenising`` once every few seconds, and never for a text that is done before that."""

    def __init__(self) -> None:
        self._said_at = time.monotonic()

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        if time.monotonic() - self._said_at >= _TOKENISING_LINE_S:
            self._said_at = time.monotonic()
            _tokenising(done_bytes, total_bytes)


def _open_data(config: RunConfig, world: World, folder: RunFolder) -> Corpus:
    """The corpus, the same on every rank."""
    corpus = build(config.data, _context_of(config), folder.cache, _Rarely() if world.rank == 0 else None)
    if world.size > 1:
        world.post("trainer/data", corpus.fingerprint() or "")
        told = world.collect("trainer/data", config.checkpoint.timeout_s)
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
    if config.model is None:
        raise ConfigError(
            "model: is missing; give {name: gpt, layers: 6, ...} or {target: 'module:function'}"
        )
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

    def __init__(self, request: Request, world: World, resolved: Resolved, folder: RunFolder) -> None:
        self.request, self.world, self.folder = request, world, folder
        self.mesh = resolved.mesh
        self.corpus = _open_data(resolved.config, world, folder)
        self.config = _with_vocabulary(resolved.config, self.corpus)
        self.engine: Engine = shardwise.initialize(_make_model(self.config), self.config, world=world)
        batch = self.config.batch
        if batch.global_size is None or batch.micro_size is None:
            raise ConfigError(
                "batch: give batch.global_size, the samples of one optimizer step over all ranks"
            )
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
        dtype = self.config.precision.compute_dtype
        peak = None if dtype is None else peak_of(world.device, dtype)
        self.peaks = None if peak is None else peak * world.size
        model = self.config.model
        # As if not causal: so the literature counts, and so figures compare.
        self.flops_per_token = flops_per_token(model, causal=False) if isinstance(model, GptPolicy) else None

    def description(self) -> str:
        """The model and what it takes, in a line."""
        plan, state = self.engine.plan, self.engine.state_bytes()
        parameters = sum(math.prod(info.shape) for info in plan.registry.of_kind("parameter"))
        return (
            f"{count_text(parameters)} parameters, ZeRO-{self.config.zero.stage}, "
            f"model state {bytes_text(sum(state.values()))} on this rank"
        )

    def go_on_from(self, start: Path) -> None:
        """Load the step at ``start``, or the newest whole one in it, with the position in the data."""
        state = self.engine.load(start)
        if state is None:
            return
        self.flops = float(state["flops"])
        self.loader.load_state(state["loader"])
        if start.resolve() in (
            self.folder.checkpoints.resolve(),
            *self.folder.checkpoints.resolve().iterdir(),
        ):
            self.saved_step = self.engine.step_count
        _log.info("going on from step %d of %s", self.engine.step_count, start)

    def run(self, sinks: Sinks, stop: StopFlag) -> bool:
        """All steps that remain; False where a signal ended them early."""
        profile = StepProfile(
            self.folder.profile / f"rank_{self.world.rank:05d}.json",
            self.request.profile_steps,
            self.world.device,
        )
        try:
            while self.engine.step_count < self.config.train.steps:
                profile.before_step()
                record = self.step()
                profile.after_step()
                sinks.write(record)
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
        train = self.config.train
        is_last = result.step == train.steps
        if is_last or (train.eval_every and result.step % train.eval_every == 0):
            self.evaluate()
            return self.record(result, step_s, None if weights is None else int(result.weight), self.val_loss)
        return self.record(result, step_s, None if weights is None else int(result.weight), None)

    def record(
        self, result: StepResult, step_s: float, tokens: int | None, val_loss: float | None
    ) -> StepRecord:
        """The row of metrics.csv."""
        known = tokens is not None and self.flops_per_token is not None
        flops = float(tokens * self.flops_per_token) if known else None  # type: ignore[operator]
        self.flops += flops or 0.0
        return StepRecord(
            step=result.step,
            loss=result.loss,
            val_loss=val_loss,
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
        with self.engine.full_parameters():
            tokens = generate(self.engine.module, prompt, train.sample_tokens, 0.8, 50, train.seed)
        return tokenizer.decode(tokens[0].tolist())


# From start to end -------------------------------------------------------------------------------------------------


def train(request: Request) -> int:
    """Train as one rank; returns the exit code."""
    config = load(request.config, request.overrides)
    world = join(timeout_s=config.comm.deadline_s * 10)
    folder = RunFolder(Path(config.out))
    console = Console(quiet=world.rank != 0)
    terminal = ConsoleHandler(console) if world.rank == 0 else None
    start = folder.start_from(request.resume)
    # Our launcher already copies what rank 0 says into its log, except to a terminal, which it does not read.
    is_copied = world.rank == 0 and is_in_job() and not console.is_terminal
    with rank_log(world.rank, None if is_copied else folder.logs, terminal):
        resolved = resolve(config, world.size, world.device.type)
        if world.rank == 0:
            for choice in resolved.choices:
                _log.info("%s", choice)
        trainer = Trainer(request, world, resolved, folder)
        _log.info("%s", trainer.description())
        if start is not None:
            trainer.go_on_from(start)
        if world.rank == 0:  # not before: a start that fails leaves the folder as it was
            for change in folder.keep_config(config.to_yaml()):
                _log.warning("since the last start of this run: %s", change)
        code = _train(trainer, console)
        trainer.engine.wait_for_save()
        world.close()
    return code


def _open_sinks(trainer: Trainer, console: Console) -> Sinks:
    if trainer.world.rank != 0:
        return Sinks([], [])
    config, first = trainer.config, trainer.engine.step_count
    sinks = open_sinks(trainer.folder.root, config.monitor, first, config.model_dump(mode="json"))
    sinks.add(open_progress(console, config.train.steps, first))
    return sinks


def _train(trainer: Trainer, console: Console) -> int:
    """The loop with everything that must be given back after it."""
    sinks = _open_sinks(trainer, console)
    stop = StopFlag(trainer.engine.request_stop)
    try:
        with stop.listening():
            is_done = trainer.run(sinks, stop)
    finally:
        sinks.close()
    engine = trainer.engine
    engine.wait_for_save()
    if not is_done:
        console.print(f"stopped after step {engine.step_count}, which is saved. Go on with:", style="bold")
        console.print(f"    {trainer.request.command()}", markup=False, highlight=False, soft_wrap=True)
        # A scheduler must not take a run that it interrupted for one that finished.
        return 128 + signal.SIGTERM if engine.agree(stop.signal == signal.SIGTERM) else 0
    _last_words(trainer, console)
    return 0


def _last_words(trainer: Trainer, console: Console) -> None:
    """Validation loss, sample, run folder."""
    if trainer.val_loss is None:
        trainer.evaluate()  # a run that was resumed at its end
    sample = trainer.sample()
    if trainer.world.rank != 0:
        return

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    loss, tokenizer = trainer.val_loss, trainer.corpus.tokenizer
    if loss is not None:
        bits = f", {loss / math.log(2):.4f} bits per byte" if tokenizer and tokenizer.name == "bytes" else ""
        say(f"validation loss {loss:.4f}{bits}")
    if sample is not None:
        trainer.folder.sample.write_text(sample, encoding="utf-8")
        say(f"sample:\n{sample}\n")
    say(f"run folder: {trainer.folder.root}")


def main(arguments: Sequence[str]) -> int:
    """Entry point of a rank that the launcher started."""
    (text,) = arguments
    return train(Request.from_json(text))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
