"""Policy of the training text or samples: the keys of ``data:``.

data: {source: stdlib, tokenizer: bytes}                       # text; a file, a folder, a token file, a list of them
data: {kind: clicks, source: [day_0.gz, day_1.gz]}             # a click log, see clicks/policy.py
data: {kind: images, source: folder_of_classes}                # pictures, see images/policy.py
data: {target: "my_package.data:build", arguments: {size: 3}}  # the user's Dataset, IterableDataset or DataLoader
"""

import re
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from shardwise.base.policy import Policy
from shardwise.data.clicks.policy import ClickPolicy
from shardwise.data.images.policy import ImagePolicy

_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


class DataPolicy(Policy):
    """Source of the training data and the order in which it is read."""

    kind: Literal["text"] = "text"
    """Text, or the result of ``target``; ``clicks`` and ``images`` have other keys."""
    source: str | list[str] = "stdlib"
    """Text to learn: ``stdlib`` (the source code of Python's standard library), a file, a folder, a token file made by
    ``shardwise convert``, or a list of these. A folder called stdlib is written ``./stdlib``.
    """
    pattern: str = "*"
    """Files of a folder that are read: a glob compared with the file's name and with its path inside the folder.
    Hidden files and folders are left out.
    """
    tokenizer: str = "bytes"
    """``bytes`` (256 tokens, nothing to install) or the path of a Hugging Face ``tokenizer.json``."""
    validation: Annotated[float, Field(ge=0, lt=1)] | str = 0.05
    """Fraction of every source, taken from its end, that is held out for evaluation (at least one window; 0: none); or
    a separate source: a file, a folder or a token file.
    """
    validation_samples: Annotated[int, Field(ge=1)] | None = None
    """Largest number of validation samples, evenly spread, that one evaluation uses; left out: all of them."""
    target: str | None = None
    """``module:function`` that returns a Dataset, an IterableDataset or a DataLoader, or a pair of them (training,
    validation). Replaces ``source``.
    """
    arguments: dict[str, Any] = {}
    """Keyword arguments of ``target``."""
    documents: bool = False
    """Keep the documents of a sequence apart: batches get ``documents``, the number of each token's document, so that
    no token sees another document, positions begin anew in each, and the last token of a document predicts nothing.
    The files of a source are documents; a token file has them as written.
    """
    shuffle: bool = True
    """Read the samples of each epoch in an order drawn from (seed, epoch); false: in the order of the data."""
    workers: Annotated[int, Field(ge=0, le=1024)] = 0
    """Processes that read samples ahead, per rank (DeepSpeed: ``data_efficiency.data_sampling.num_workers``). Text
    needs none: a thread reads it ahead.
    """
    cache: str | None = None
    """Folder that keeps the tokenised text between runs; left out: ``cache`` inside the run folder."""

    @model_validator(mode="after")
    def _check(self) -> "DataPolicy":
        if self.target is not None and not _TARGET.fullmatch(self.target):
            raise ValueError(
                f"target is {self.target!r}; expected 'module:function', as in 'my_package.data:build'"
            )
        if self.target is not None and "source" in self.model_fields_set:
            raise ValueError("source and target are both given; keep the one that training data comes from")
        if self.target is None and self.arguments:
            raise ValueError(
                "arguments are given without a target; they are the keyword arguments of the target"
            )
        if self.documents and self.target is not None:
            raise ValueError(
                "documents: true reads the ends of documents from text, and target brings samples; let the target's "
                "samples have 'documents', and leave the key out"
            )
        if isinstance(self.source, list) and not self.source:
            raise ValueError("source is an empty list; give stdlib, a file, a folder or a token file")
        return self


def with_kind(given: Any, kind: str) -> Any:
    """Return the unchecked value of ``data:`` with ``kind`` filled in if the value has none."""
    return {"kind": kind, **(given or {})} if given is None or isinstance(given, dict) else given


def _kind(given: Any) -> str:
    kind = given.get("kind") if isinstance(given, dict) else getattr(given, "kind", None)
    return kind if kind in ("clicks", "images") else "text"


AnyDataPolicy = Annotated[
    Annotated[DataPolicy, Tag("text")]
    | Annotated[ClickPolicy, Tag("clicks")]
    | Annotated[ImagePolicy, Tag("images")],
    Discriminator(_kind),
]
"""The type of ``data:`` in a configuration."""
