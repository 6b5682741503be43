"""Runs over clicks: a click-through model of ours, or a user's model for the same batches.

A microbatch is weighted by its samples; in the last step of the last epoch it may have none. Evaluations compute the
exact AUC and log loss over the held-out rows of all ranks (observe/auc.py); ``train.early_stop`` uses the AUC. Keys are
exchanged ``tables.prefetch_steps`` steps ahead, in training and in evaluations (engine/step/prefetch.py).
"""

import functools
import logging
import math
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.base.errors import UsageError
from shardwise.cli.profile import NO_PROFILE, ProfileRequest
from shardwise.cli.runs.run_folder import RunFolder
from shardwise.cli.trainer import ConversionProgress, OpenedData, Throughput, Trainer
from shardwise.comm.world import World
from shardwise.config.auto import ResolvedConfig
from shardwise.config.run import RunConfig
from shardwise.data.batched import Watch
from shardwise.data.clicks import ClickPolicy, build_clicks
from shardwise.engine.step.end import StepResult
from shardwise.models import TargetPolicy, build_ctr
from shardwise.models import build as build_model
from shardwise.models.ctr.policy import CtrPolicy
from shardwise.observe.auc import ClickMetrics, ClickScore, most_bytes
from shardwise.observe.lanes_picture import LaneRecorder, LaneRows
from shardwise.observe.memory import taken
from shardwise.observe.metrics import ClickRecord
from shardwise.optim.schedule_policy import ends_at, lacks_end
from shardwise.parallel.embedding.planner import PlacementChoice
from shardwise.parallel.embedding.rows.keyed_rows import RowTally

_log = logging.getLogger(__name__)


class ClickTrainer(Trainer):
    """One rank's run over clicks."""

    record_kind = ClickRecord
    metric = "auc"

    def __init__(
        self,
        world: World,
        resolved: ResolvedConfig,
        folder: RunFolder,
        profile: ProfileRequest = NO_PROFILE,
    ) -> None:
        super().__init__(world, resolved, folder, profile)
        self.score: ClickScore | None = None
        self.tally = self._earlier = RowTally(0)
        """Rows of all tables at the last evaluation, and before this process."""
        self._throughput = Throughput("samples")
        for name, collection in self.engine.tables.items():
            for line in described(collection.choices):
                _log.info("%s: %s", name, line)

    def open_data(self, config: RunConfig) -> OpenedData:
        """Open the log, and set the number of steps from its epochs, which schedules need."""
        assert isinstance(config.data, ClickPolicy), "text has a trainer of its own"
        reading = ConversionProgress("packing clicks") if self.world.rank == 0 else None
        self.corpus = build_clicks(config.data, self.folder.cache, reading)
        if self.corpus.skipped:
            _log.warning("data: %d malformed rows were skipped", self.corpus.skipped)
        assert config.batch.global_size is not None, "Request.load refuses a run without a batch size"
        self.lanes = LaneRecorder(config.batch.global_size)
        config = with_steps(config, len(self.corpus.train), config.data.epochs)
        return OpenedData(config, self.corpus.train, self.corpus.validation, self.corpus.fingerprint())

    @property
    def epochs(self) -> int | None:
        """Value of ``data.epochs``."""
        assert isinstance(self.config.data, ClickPolicy), "checked when the data was opened"
        return self.config.data.epochs

    @property
    def watch(self) -> Watch:
        """Recorder of readers, as a lane of the picture."""
        return self.lanes.watch

    def steps(self) -> Generator[list[Any]]:
        """Yield this rank's microbatches, with their keys exchanged ahead."""
        with self.engine.prefetch(self.loader, lanes=self.lanes) as steps:
            yield from steps

    @property
    def predictions_bytes(self) -> int:
        """Bytes of host memory that an evaluation takes for its predictions."""
        limit = self.config.data.validation_samples
        held_out = len(self.corpus.validation)
        return most_bytes(held_out if limit is None else min(limit, held_out), self.mesh.size("dp"))

    def make_model(self) -> nn.Module:
        """Make our model without weights, with a table for each feature, or the user's as it comes."""
        model, seed = self.config.model, self.config.train.seed
        if isinstance(model, TargetPolicy):
            return build_model(model, seed=seed)
        assert isinstance(model, CtrPolicy), "a gpt reads text"
        with torch.device("meta"):
            return build_ctr(model, self.corpus.schema, self.config.tables, self.corpus.table_rows, seed)

    def weights(self, batches: Sequence[Any]) -> list[float]:
        """Return the number of samples of each microbatch."""
        return [float(batch["labels"].numel()) for batch in batches]

    def record(self, result: StepResult, step_s: float, is_weighted: bool) -> ClickRecord:
        """Return the row of metrics.csv."""
        record = ClickRecord(**self._throughput.count(result, step_s), **taken(self.world.device)._asdict())
        figures = self.engine.take_tier_figures()
        if figures is None:
            return record
        self.lanes.note_rows(result.step, LaneRows(figures.hits, figures.misses, figures.stall_s))
        return record._replace(
            hits=figures.hits,
            misses=figures.misses,
            read_ahead=figures.read_ahead,
            stall_s=figures.stall_s,
        )

    def evaluate(self) -> float:
        """Compute AUC and log loss over the held-out rows into ``score`` and return the AUC.

        The rows of the tables are counted into ``tally``.
        """
        metrics = ClickMetrics()
        with self.evaluating():
            for batch in self.engine.prefetch(batch for batch, _ in self.validation_batches()):
                (output,) = self.engine.predict([batch])
                metrics.add(logits_in(output), batch["labels"])
        self.score = metrics.result(self.ranks)
        self.tally = self._count_rows()
        if math.isnan(self.score.auc) and self.world.rank == 0:
            _log.warning(
                "the AUC is undefined: all %d samples held out have the same label; set data.validation so that both "
                "labels are held out",
                self.score.samples,
            )
        return self.score.auc

    def results(self) -> dict[str, float]:
        """Return the AUC and the log loss of the last evaluation."""
        assert self.score is not None, "evaluated before"
        return {"auc": self.score.auc, "log_loss": self.score.log_loss}

    def with_evaluation(self, record: Any) -> ClickRecord:
        """Return the record with the score, and the numbers of rows in the tables."""
        assert self.score is not None, "evaluated before"
        found: ClickRecord = record._replace(
            log_loss=self.score.log_loss, auc=self.score.auc, **self.tally._asdict()
        )
        return found

    def _count_rows(self) -> RowTally:
        """Count the rows of all tables and ranks, including earlier processes of the run. Collective."""
        tallies = list(self.engine.table_tallies().values())
        return RowTally(
            sum(each.rows for each in tallies),
            self._earlier.inserted + sum(each.inserted for each in tallies),
            self._earlier.evicted + sum(each.evicted for each in tallies),
        )

    def state(self) -> dict[str, Any]:
        """Return the numbers of inserted and evicted rows."""
        return {"tables": self._count_rows()._asdict()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the numbers of inserted and evicted rows."""
        self._earlier = RowTally(**state["tables"])

    @functools.cached_property
    def best(self) -> ClickScore | None:
        """Score of the planted teacher on the held-out rows, which models exceed only by chance; one pass over them."""
        return self.corpus.best_on_validation(self.config.data.validation_samples)

    def last_words(self) -> list[str]:
        """Return lines on the score beside the best possible, the tables, and the speed."""
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
    """Return the configuration with at most the steps of the epochs; a schedule without an end ends with the steps.

    The rules are checked again for these steps when the engine is made, for example that a warm-up is shorter.

    Args:
        config: The configuration.
        samples: Samples of an epoch.
        epochs: Number of epochs; None: as many steps as configured.
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


def described(choices: Sequence[PlacementChoice]) -> list[str]:
    """Return where tables lie and why, a line for neighbours that are alike."""
    said: list[tuple[str, list[str]]] = []
    for choice in choices:
        what = str(choice).removeprefix(choice.table).strip()
        if said and said[-1][0] == what:
            said[-1][1].append(choice.table)
        else:
            said.append((what, [choice.table]))
    return [f"{names[0]}{f' to {names[-1]}' if len(names) > 1 else ''} {what}" for what, names in said]


def logits_in(output: Any) -> Tensor:
    """Return the predictions in a model's output.

    Raises:
        UsageError: if there are none.
    """
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise UsageError(
            f"the model returned a {type(output).__name__} without logits; to be evaluated on clicks it returns "
            '{"loss": ..., "logits": ...}, one logit for each sample'
        )
    return logits
