"""Runs over clicks: a click-through model of ours, or one of the user's that takes the same batches.

A microbatch counts by its samples; in the last step of the last epoch it may have none. Evaluations give the exact AUC
and log loss over the held-out rows of all ranks (observe/auc.py); ``train.early_stop`` looks at the AUC. Keys are
exchanged ``tables.prefetch_steps`` steps ahead, in training and in evaluations (engine/prefetch.py).
"""

import functools
import logging
import math
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.cli.run_folder import RunFolder
from shardwise.cli.trainer import Opened, Reading, Throughput, Trainer
from shardwise.comm.world import World
from shardwise.config.auto import Resolved
from shardwise.config.run import RunConfig
from shardwise.data.batched import Watch
from shardwise.data.clicks import ClickPolicy, build_clicks
from shardwise.engine.step import StepResult
from shardwise.models import TargetPolicy, build_ctr
from shardwise.models import build as build_model
from shardwise.models.ctr.policy import CtrPolicy
from shardwise.observe.auc import ClickMetrics, ClickScore
from shardwise.observe.lanes_picture import Lanes
from shardwise.observe.memory import taken
from shardwise.observe.metrics import ClickRecord
from shardwise.optim.schedule_policy import ends_at, lacks_end
from shardwise.parallel.embedding.planner import Choice
from shardwise.parallel.embedding.rows import Tally
from shardwise.plan.errors import UsageError

_log = logging.getLogger(__name__)


class ClickTrainer(Trainer):
    """One rank's run over clicks."""

    record_kind = ClickRecord
    higher_is_better = True

    def __init__(self, world: World, resolved: Resolved, folder: RunFolder, profile_steps: int = 0) -> None:
        super().__init__(world, resolved, folder, profile_steps)
        self.score: ClickScore | None = None
        self.tally = self._earlier = Tally(0)
        """Rows of all tables at the last evaluation, and before this process."""
        self._throughput = Throughput("samples")
        for name, collection in self.engine.tables.items():
            for line in described(collection.choices):
                _log.info("%s: %s", name, line)

    def open_data(self, config: RunConfig) -> Opened:
        """The log, and with its epochs the number of steps, by which schedules end."""
        assert isinstance(config.data, ClickPolicy), "text has a trainer of its own"
        reading = Reading("packing clicks") if self.world.rank == 0 else None
        self.corpus = build_clicks(config.data, self.folder.cache, reading)
        if self.corpus.skipped:
            _log.warning("data: %d malformed rows were skipped", self.corpus.skipped)
        assert config.batch.global_size is not None, "Request.load refuses a run without a batch size"
        self.lanes = Lanes(config.batch.global_size)
        config = with_steps(config, len(self.corpus.train), config.data.epochs)
        return Opened(config, self.corpus.train, self.corpus.validation, self.corpus.fingerprint())

    @property
    def epochs(self) -> int | None:
        """As ``data.epochs`` says."""
        assert isinstance(self.config.data, ClickPolicy), "checked when the data was opened"
        return self.config.data.epochs

    @property
    def watch(self) -> Watch:
        """What readers do is a lane of the picture."""
        return self.lanes.watch

    def steps(self) -> Generator[list[Any]]:
        """With their keys exchanged ahead."""
        with self.engine.prefetch(self.loader, lanes=self.lanes) as steps:
            yield from steps

    def make_model(self) -> nn.Module:
        """Ours with a table for each feature, without weights; the user's as it comes."""
        model, seed = self.config.model, self.config.train.seed
        if isinstance(model, TargetPolicy):
            return build_model(model, seed=seed)
        assert isinstance(model, CtrPolicy), "a gpt reads text"
        with torch.device("meta"):
            return build_ctr(model, self.corpus.schema, self.config.tables, self.corpus.table_rows, seed)

    def weights(self, batches: Sequence[Any]) -> list[float]:
        """Samples."""
        return [float(batch["labels"].numel()) for batch in batches]

    def record(self, result: StepResult, step_s: float, is_weighted: bool) -> ClickRecord:
        """The row of metrics.csv."""
        return ClickRecord(**self._throughput.count(result, step_s), **taken(self.world.device)._asdict())

    def evaluate(self) -> float:
        """AUC and log loss over the held-out rows, into ``score``; rows of the tables, into ``tally``."""
        metrics = ClickMetrics()
        with self.evaluating():
            for batch in self.engine.prefetch(batch for batch, _ in self.validation_batches()):
                (output,) = self.engine.predict([batch])
                metrics.add(logits_in(output), batch["labels"])
        self.score = metrics.result(self.ranks)
        self.tally = self._count_rows()
        return self.score.auc

    def with_evaluation(self, record: Any) -> ClickRecord:
        """With the score, and the rows that the tables hold."""
        assert self.score is not None, "evaluated before"
        found: ClickRecord = record._replace(
            log_loss=self.score.log_loss, auc=self.score.auc, **self.tally._asdict()
        )
        return found

    def _count_rows(self) -> Tally:
        """Over all tables and ranks, those of earlier lives of the run included. Collective."""
        tallies = list(self.engine.table_tallies().values())
        return Tally(
            sum(each.rows for each in tallies),
            self._earlier.inserted + sum(each.inserted for each in tallies),
            self._earlier.evicted + sum(each.evicted for each in tallies),
        )

    def state(self) -> dict[str, Any]:
        """Rows that came and went."""
        return {"tables": self._count_rows()._asdict()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on counting."""
        self._earlier = Tally(**state["tables"])

    @functools.cached_property
    def best(self) -> ClickScore | None:
        """What the planted teacher scores on the held-out rows: no model does better but by luck. A pass over them."""
        return self.corpus.best_on_validation(self.config.data.validation_samples)

    def last_words(self) -> list[str]:
        """The score beside the best possible one, the tables, and how fast it went."""
        assert self.score is not None, "clicks always have rows held out"
        score, tally = self.score, self.tally
        said = [f"AUC {score.auc:.4f}, log loss {score.log_loss:.4f} over {score.samples:,} samples held out"]
        best = self.best if self.world.rank == 0 else None
        if best is not None:
            said.append(f"best possible on them: AUC {best.auc:.4f}, log loss {best.log_loss:.4f}")
        if self.engine.tables:
            said.append(
                f"tables: {tally.rows:,} rows in use, {tally.inserted:,} inserted, {tally.evicted:,} evicted"
            )
        return said + self._throughput.lines()


def with_steps(config: RunConfig, samples: int, epochs: int | None) -> RunConfig:
    """No more steps than the epochs have; a schedule that was to end with the steps ends there.

    The rules are checked again for these steps when the engine is made, such as that a warm-up is shorter.
    """
    assert config.batch.global_size is not None, "Request.load refuses a run without a batch size"
    if epochs is None:
        return config
    train, schedule = config.train, config.schedule
    steps = math.ceil(epochs * samples / config.batch.global_size)
    if "steps" in train.model_fields_set:
        steps = min(steps, train.steps)
    if lacks_end(schedule) or getattr(schedule, "total_steps", None) == train.steps:
        schedule = ends_at(schedule, steps)
    train = train.model_copy(update={"steps": steps})
    return config.model_copy(update={"train": train, "schedule": schedule})


def described(choices: Sequence[Choice]) -> list[str]:
    """Where tables lie and why: a line for neighbours that are alike."""
    said: list[tuple[str, list[str]]] = []
    for choice in choices:
        what = str(choice).removeprefix(choice.table).strip()
        if said and said[-1][0] == what:
            said[-1][1].append(choice.table)
        else:
            said.append((what, [choice.table]))
    return [f"{names[0]}{f' to {names[-1]}' if len(names) > 1 else ''} {what}" for what, names in said]


def logits_in(output: Any) -> Tensor:
    """The predictions in what a model returned."""
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise UsageError(
            f"the model returned a {type(output).__name__} without logits; to be evaluated on clicks it returns "
            '{"loss": ..., "logits": ...}, one logit for each sample'
        )
    return logits
