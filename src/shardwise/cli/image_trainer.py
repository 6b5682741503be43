"""Runs over pictures: an image model of ours, or a user's model that takes ``(images, labels)``.

A microbatch is weighted by its pictures. An evaluation runs the model on the held-out pictures, each once over all
ranks; loss, accuracy and metrics of the user's own (``train.metrics``) are sums over all of them, in fp64.
``train.early_stop`` uses the accuracy. Every line shows how long steps wait for pictures.
"""

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from shardwise.base.errors import UsageError
from shardwise.base.target import load_target
from shardwise.cli.click_trainer import logits_in
from shardwise.cli.profile import NO_PROFILE, ProfileRequest
from shardwise.cli.runs.run_folder import RunFolder
from shardwise.cli.trainer import OpenedData, Throughput, Trainer
from shardwise.comm.world import World
from shardwise.config.auto import ResolvedConfig
from shardwise.config.run import RunConfig
from shardwise.data.images import ImagePolicy, LabelsOnly, build_images
from shardwise.engine.step.end import StepResult
from shardwise.models import TargetPolicy, build_image_model
from shardwise.models import build as build_model
from shardwise.models.images.policy import ImageModelPolicy
from shardwise.observe.memory import taken
from shardwise.observe.metrics import ImageRecord
from shardwise.parallel.pipeline.layers import Layers

_log = logging.getLogger(__name__)

_SIDE = 224
"""Pixels of the side for a model without a size of its own."""

Metrics = Callable[[Any, Tensor], Mapping[str, Any]]
"""Function that ``train.metrics`` names."""


class _MetricPart(NamedTuple):
    """Contribution of one batch to a metric."""

    total: float
    of: float


class ImageTrainer(Trainer):
    """One rank's run over pictures."""

    record_kind = ImageRecord
    metric = "accuracy"

    def __init__(
        self,
        world: World,
        resolved: ResolvedConfig,
        folder: RunFolder,
        profile: ProfileRequest = NO_PROFILE,
    ) -> None:
        super().__init__(world, resolved, folder, profile)
        wanted = self.config.train.metrics
        self._metrics: Metrics | None = None if wanted is None else load_target("train.metrics", wanted)
        self.score: dict[str, float] = {}
        """Results of the last evaluation: loss, accuracy, and the metrics of ``train.metrics``."""
        self._throughput = Throughput("pictures")

    def open_data(self, config: RunConfig) -> OpenedData:
        """Open the pictures, in the size that the model takes."""
        assert isinstance(config.data, ImagePolicy), "text and clicks have trainers of their own"
        self.corpus = build_images(config.data, side_of(config))
        return OpenedData(config, self.corpus.train, self.corpus.validation, self.corpus.fingerprint())

    def make_model(self) -> nn.Module:
        """Make the model with its start weights."""
        model, seed = self.config.model, self.config.train.seed
        if isinstance(model, TargetPolicy):
            return build_model(model, seed=seed)
        assert isinstance(model, ImageModelPolicy), (
            "a rule of the configuration: other models read no pictures"
        )
        return build_image_model(model, len(self.corpus.class_names), seed)

    def to_read(self, data: Any, whole: int = 0) -> Any:
        """Return labels only on stages that read no pictures: in a list of layers, only the first stage reads them."""
        reads_all = self.mesh.index("pp", self.world.rank) == 0 or not isinstance(self.engine.module, Layers)
        return data if reads_all or data is None else LabelsOnly(data, whole)

    def weights(self, batches: Sequence[Any]) -> list[float]:
        """Return the number of pictures of each microbatch."""
        return [float(len(labels)) for _, labels in batches]

    def record(self, result: StepResult, step_s: float, is_weighted: bool) -> ImageRecord:
        """Return the row of metrics.csv."""
        return ImageRecord(**self._throughput.count(result, step_s), **taken(self.world.device)._asdict())

    def evaluate(self) -> float:
        """Compute all metrics over the held-out pictures into ``score``, and return the accuracy."""
        parts: dict[str, list[_MetricPart]] = {}
        with self.evaluating():
            for outputs, labels, samples in self._outputs():
                for name, part in self._parts_of(outputs, labels, samples).items():
                    parts.setdefault(name, []).append(part if samples else _MetricPart(0.0, 0.0))
        sums = torch.tensor(
            [[sum(column) for column in zip(*each, strict=True)] for each in parts.values()],
            dtype=torch.float64,
            device=self.world.device,
        )
        self.ranks.all_reduce(sums.view(-1), "sums of the evaluation", purpose="control").wait()
        self.score = {
            name: total / count if count else float("nan")
            for name, (total, count) in zip(parts, sums.tolist(), strict=True)
        }
        if len(self.score) > len(_OURS):
            _log.info("after step %d: %s", self.engine.step_count, self._told(set(self.score) - _OURS))
        return self.score["accuracy"]

    def results(self) -> dict[str, float]:
        """Return all metrics of the last evaluation."""
        return self.score

    def _outputs(self) -> Iterator[tuple[Any, Tensor, int]]:
        """Yield the model's outputs for held-out pictures, their labels, and how many count. Collective."""
        several = 4 * self.mesh.pp if self.mesh.pp > 1 else 1
        batches = self.validation_batches()
        while chunk := list(itertools.islice(batches, several)):
            outputs = self.engine.predict([(batch.images,) for batch, _ in chunk])
            for output, (batch, samples) in zip(outputs, chunk, strict=True):
                yield output, batch.labels, samples

    def _parts_of(self, outputs: Any, labels: Tensor, samples: int) -> dict[str, _MetricPart]:
        """Return the contribution of a batch to each metric; the same names on every rank, in the same order."""
        logits = outputs if isinstance(outputs, Tensor) else logits_in(outputs)
        labels = labels.to(logits.device)
        parts = {
            "loss": _MetricPart(float(cross_entropy(logits.double(), labels, reduction="sum")), samples),
            "accuracy": _MetricPart(float((logits.argmax(-1) == labels).sum()), samples),
        }
        if self._metrics is not None:
            found = self._metrics(outputs, labels)
            if not isinstance(found, Mapping) or _OURS & set(found):
                raise UsageError(
                    f"train.metrics: {self.config.train.metrics} returned {found!r:.200}; expected {{name: sum}} or "
                    f"{{name: (sum, count)}}, with names other than {' and '.join(sorted(_OURS))}"
                )
            for name in sorted(found):
                given = found[name]
                total, count = given if isinstance(given, tuple | list) else (given, samples)
                parts[name] = _MetricPart(float(total), float(count))
        return parts

    def with_evaluation(self, record: Any) -> ImageRecord:
        """Return the record with loss and accuracy."""
        found: ImageRecord = record._replace(val_loss=self.score["loss"], accuracy=self.score["accuracy"])
        return found

    def state(self) -> dict[str, Any]:
        """Return an empty state, because everything follows from the step."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Do nothing, because the state is empty."""

    def _told(self, names: set[str]) -> str:
        return ", ".join(f"{name} {self.score[name]:.4f}" for name in self.score if name in names)

    def last_words(self) -> list[str]:
        """Return lines on the score, the speed, and the waits for pictures."""
        said = []
        if self.validation is not None:
            said.append(
                f"held out, {len(self.corpus.validation or ())} pictures: {self._told(set(self.score))}"
            )
        waited = self.waited_s / self._throughput.seconds if self._throughput.seconds else 0.0
        return said + [
            f"{line}; {waited:.1%} of it waiting for pictures" for line in self._throughput.lines()
        ]


_OURS = frozenset({"loss", "accuracy"})


def side_of(config: RunConfig) -> int:
    """Return the pixels of the pictures' side: ``data.size``, else the model's."""
    assert isinstance(config.data, ImagePolicy), "only pictures have a side"
    return config.data.size or int(getattr(config.model, "size", None) or _SIDE)
