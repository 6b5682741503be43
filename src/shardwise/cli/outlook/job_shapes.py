"""The model and one microbatch of a run as shapes, without its data, for ``shardwise plan``.

    text                 model.vocab, or the vocabulary of data.tokenizer; micro_size windows of model.context tokens
    clicks               the columns that ``data:`` and the heads of its files give; one key for each feature and row
    pictures             the size of ``data:`` or of the model; the classes of ``data:`` or of the names of its folders
    data.target          the first sample of the user's data, as often as a microbatch has samples

Text is not read, click logs are not converted and pictures are not decoded, so a run can be planned on a machine that
does not have its data. Data of a target is the exception: its function is called, and one sample is read.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from shardwise.base.errors import ConfigError, DataError
from shardwise.base.ragged import Ragged
from shardwise.cli.image_trainer import side_of
from shardwise.cli.text_trainer import context_of
from shardwise.config.run import RunConfig
from shardwise.data import DataPolicy, build
from shardwise.data.clicks import ClickPolicy, columns_of
from shardwise.data.images import ImagePolicy, classes_of
from shardwise.data.tokenizer import load_tokenizer
from shardwise.models import BertPolicy, GptPolicy, TargetPolicy, build_ctr, build_image_model
from shardwise.models import build as build_model
from shardwise.models.ctr.policy import CtrPolicy
from shardwise.models.images.policy import ImageModelPolicy


class JobShapes(NamedTuple):
    """A run's model and the shapes of one of its microbatches."""

    config: RunConfig
    """The configuration with the values that follow from the data's shapes, such as ``model.vocab``."""
    make: Callable[[], nn.Module]
    """Builds the model anew each time, on meta if the model is one of ours."""
    example: Any
    """One microbatch: tensors of its shapes, of which no number is read."""
    tokens: int | None
    """Tokens of one sample; None for data that is not text of ours."""
    assumes: tuple[str, ...] = ()
    """Sentences on shapes that the configuration alone does not decide."""


def shapes_of(config: RunConfig, micro_size: int) -> JobShapes:
    """Return the model and a microbatch of the run that ``config`` describes.

    Args:
        config: The configuration, with a model.
        micro_size: Samples of a microbatch.

    Raises:
        ConfigError: if the shapes do not follow from the configuration.
        DataError: if a tokenizer, the head of a click log or a sample of ``data.target`` cannot be read.
    """
    data = config.data
    if isinstance(data, ClickPolicy):
        return _of_clicks(config, data, micro_size)
    if isinstance(data, ImagePolicy):
        return _of_pictures(config, data, micro_size)
    if data.target is not None:
        return _of_samples(config, data, micro_size)
    return _of_text(config, data, micro_size)


def on_meta(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return a maker of the same model on meta: shapes without memory."""

    def made() -> nn.Module:
        with torch.device("meta"):
            return make()

    return made


def _of_text(config: RunConfig, data: DataPolicy, micro_size: int) -> JobShapes:
    model, context = config.model, context_of(config, data)
    tokens = torch.empty(micro_size, context, dtype=torch.int64, device="meta")
    example = {"tokens": tokens, "targets": tokens} | ({"documents": tokens} if data.documents else {})
    config, make = _language_model(config, _vocabulary(config, data))
    if isinstance(model, GptPolicy | BertPolicy):
        make = on_meta(make)
    return JobShapes(config, make, example, context)


def _vocabulary(config: RunConfig, data: DataPolicy) -> int | None:
    """Return the tokenizer's vocabulary; None if the model brings its own and the tokenizer cannot be read here.

    Raises:
        ConfigError: if the vocabulary follows from nothing.
    """
    given = getattr(config.model, "vocab", None)
    is_own = isinstance(config.model, TargetPolicy)
    is_missing = data.tokenizer != "bytes" and not Path(data.tokenizer).exists()
    if is_own or (given is not None and is_missing):
        return None
    if is_missing:
        raise ConfigError(
            f"model.vocab is not set, and data.tokenizer, from which it follows, names no file: {data.tokenizer}; set "
            "model.vocab, or give the path of a tokenizer.json"
        )
    return load_tokenizer(data.tokenizer).vocab_size


def _language_model(config: RunConfig, vocab: int | None) -> tuple[RunConfig, Callable[[], nn.Module]]:
    model, seed = config.model, config.train.seed
    if isinstance(model, GptPolicy):
        whole: GptPolicy | BertPolicy = model.resolved(vocab)
    elif isinstance(model, BertPolicy):
        whole = model if vocab is None else model.resolved(vocab)
    else:
        assert isinstance(model, TargetPolicy), (
            "rules of the configuration: text for a gpt, a bert or a target"
        )
        return config, lambda: build_model(model, seed=seed)
    return config.model_copy(update={"model": whole}), lambda: build_model(whole)


def _of_clicks(config: RunConfig, data: ClickPolicy, micro_size: int) -> JobShapes:
    columns = columns_of(data)
    keys = torch.zeros(micro_size, dtype=torch.int64)
    example = {
        "dense": torch.zeros(micro_size, len(columns.schema.dense)),
        "sparse": {
            feature.name: Ragged(keys, torch.arange(micro_size + 1)) for feature in columns.schema.features
        },
        "labels": torch.zeros(micro_size),
    }
    model, seed = config.model, config.train.seed
    several = sorted(feature.name for feature in columns.schema.features if feature.many)
    assumes = [f"clicks: one key in a row of {', '.join(several)}, which may have more"] if several else []
    if isinstance(model, CtrPolicy):
        made = on_meta(lambda: build_ctr(model, columns.schema, config.tables, columns.table_rows, seed))
        return JobShapes(config, made, example, None, tuple(assumes))
    assert isinstance(model, TargetPolicy), "rules of the configuration: clicks for a ctr model or a target"
    return JobShapes(config, lambda: build_model(model, seed=seed), example, None, tuple(assumes))


def _of_pictures(config: RunConfig, data: ImagePolicy, micro_size: int) -> JobShapes:
    side, model, seed = side_of(config), config.model, config.train.seed
    example = (
        torch.empty(micro_size, 3, side, side, device="meta"),
        torch.empty(micro_size, dtype=torch.int64, device="meta"),
    )
    if isinstance(model, ImageModelPolicy):
        classes = classes_of(data)
        return JobShapes(config, lambda: build_image_model(model, classes, seed), example, None)
    assert isinstance(model, TargetPolicy), "rules of the configuration: pictures for a model of images"
    return JobShapes(config, lambda: build_model(model, seed=seed), example, None)


def _of_samples(config: RunConfig, data: DataPolicy, micro_size: int) -> JobShapes:
    """Return the shapes of a user's data: of its first sample, or of a DataLoader's first batch as it comes."""
    corpus = build(data, context_of(config, data), Path("unused, because a target is not cached"))
    train = corpus.train
    config, make = _language_model(config, corpus.vocab_size)
    if isinstance(train, DataLoader):
        sample, collate, batch = _first(train.dataset), train.collate_fn, train.batch_size
        example = sample if batch is None else collate([sample] * micro_size)
    else:
        example = default_collate([_first(train)] * micro_size)
    tokens = example.get("tokens") if isinstance(example, dict) else None
    length = int(tokens.shape[-1]) if isinstance(tokens, Tensor) and tokens.dim() == 2 else None
    assumes = ("data.target: every sample as large as the first",)
    return JobShapes(config, make, example, length, assumes)


def _first(data: Any) -> Any:
    """Return the first sample of a Dataset or of an IterableDataset.

    Raises:
        DataError: if the data has no sample.
    """
    try:
        if hasattr(data, "__getitem__"):
            return data[0]
        if isinstance(data, Iterable):
            return next(iter(data))
    except (IndexError, StopIteration):
        raise DataError("data.target: the data has no sample, so a microbatch has no shape") from None
    raise ConfigError(
        f"data.target returned {type(data).__name__}, which has no samples; expected a Dataset, an IterableDataset "
        "or a DataLoader"
    )
