"""Explanations of errors in the model's own forward code: the module that failed, and the contents of the batch.

    an array of numpy in the batch    UsageError that names the entry
    any other error                   the same error, with a note that names the module and the tensors of the batch

Cost: nothing in a pass that succeeds.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import numpy as np
from torch import Tensor, nn

from shardwise.base.errors import ShardwiseError, UsageError

_ENTRIES = 8
"""Number of tensors that a note describes."""


@contextmanager
def explained(batch: Any) -> Iterator[None]:
    """Explain an error that the forward pass inside the context raises.

    Args:
        batch: the batch that the model is given.

    Raises:
        UsageError: if the pass fails on a NumPy array.
    """
    try:
        yield
    except ShardwiseError:
        raise
    except Exception as error:
        entries = list(_entries(batch))
        arrays = [name for name, each in entries if isinstance(each, np.ndarray)]
        if arrays and isinstance(error, TypeError | AttributeError):
            raise UsageError(
                f"the batch holds numpy arrays ({', '.join(arrays[:_ENTRIES])}), and the model failed on them: "
                f"{error}. Give tensors: torch.from_numpy(array), or torch.utils.data.default_collate of samples"
            ) from error
        note = _note(error.__traceback__, entries)
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        raise


def _note(traceback: TracebackType | None, entries: list[tuple[str, Any]]) -> str:
    root, inner = None, None
    while traceback is not None:
        frame = traceback.tb_frame
        found = frame.f_locals.get("self") if "self" in frame.f_code.co_varnames[:1] else None
        if isinstance(found, nn.Module):
            root, inner = root or found, found
        traceback = traceback.tb_next
    place = "before the model's forward"
    if root is not None and inner is not None:
        name = next((name for name, each in root.named_modules() if each is inner), "")
        place = f"in module {name or '(root)'!r} ({type(inner).__name__})"
    shown = [f"{name} {_described(each)}" for name, each in entries if isinstance(each, Tensor)][:_ENTRIES]
    held = f"; the batch holds {', '.join(shown)}" if shown else ""
    return f"shardwise: {place}{held}"


def _described(tensor: Tensor) -> str:
    kind = str(tensor.dtype).removeprefix("torch.")
    place = "" if tensor.device.type == "cpu" else f" on {tensor.device}"
    return f"{kind} {list(tensor.shape)}{place}"


def _entries(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a batch with the keys or indices that lead to them."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _entries(inner, f"{name}[{key!r}]")
    elif isinstance(value, tuple | list):
        for i, inner in enumerate(value):
            yield from _entries(inner, f"{name}[{i}]")
    else:
        yield f"batch{name}", value
