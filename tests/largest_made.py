"""Memory that operations of torch make, seen from outside: the largest piece of it."""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestMade(TorchDispatchMode):
    """Bytes of the largest storage that an operation inside made; one that it was given is not made."""

    largest = 0

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs))
        given = {each.untyped_storage().data_ptr() for each in leaves if isinstance(each, Tensor)}
        out = call(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, Tensor) and each.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, each.untyped_storage().nbytes())
        return out
