"""Exchanges as operators of torch's dispatcher, so that ``torch.compile`` keeps them in the graph of a block.

    site = ExchangeSite(group, "blocks.0.attention.out")       made once, beside the layer

    @exchange_operator("doubled(Tensor x) -> Tensor", lambda size, x: torch.empty_like(x))
    def doubled(site, x): ...                                  the body, which calls the site's Group

    doubled(site, x)      not compiled: the body itself, without the dispatcher
                          while a compiler traces: torch.ops.shardwise.doubled(site.tag, site.size, x)

A compiler can read no Group: it holds communicators, clocks and counts of traffic. The operator gets the site as a
tensor on the CPU that holds a number (``tag``), and finds the site by that number when it runs. The compiler reads no
value of a tensor, so that blocks that differ only in their names share one graph; a number or a name would be compiled
into the graph of each block.

The sites are held weakly and their numbers are never used twice: a site ends with the layer that has it, and engines in
one process cannot mix. An operator calls the same Group as uncompiled code, so that traffic, deadlines and errors do
not change. Operators have no gradients: their callers are ``autograd.Function``, which the compiler traces into.

A CUDA graph must not record an exchange, whose host work (traffic, deadlines) would not be replayed: operators are
tagged, and torch cuts its graphs around them.

Cost: uncompiled, 0.1 microseconds a call. In a graph, one dispatch of an operator an exchange.
"""

import itertools
import weakref
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from shardwise.base.errors import CommError
from shardwise.comm.collectives import Group

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="ExchangeSite")

_LIBRARY = torch.library.Library("shardwise", "FRAGMENT")
_NUMBERS = itertools.count()
_SITES: "weakref.WeakValueDictionary[int, ExchangeSite]" = weakref.WeakValueDictionary()


class ExchangeSite:
    """A place in a model that exchanges tensors: its ranks, its name, and the number by which operators find it.

    Args:
        group: The ranks.
        what: Name of the tensor or of the layer in errors and traces.
    """

    def __init__(self, group: Group, what: str) -> None:
        self.group = group
        self.what = what
        self.size = group.size
        """Number of ranks, which determines the shapes of results."""
        self.index = group.index
        """Index of this rank in the group."""
        number = next(_NUMBERS)
        with torch.device("cpu"):
            self.tag = torch.tensor(number)
        """Number of the site, in a tensor on the CPU."""
        _SITES[number] = self

    def __deepcopy__(self, memo: Any) -> "ExchangeSite":
        """Return the site itself: the ranks of a copied layer are the same."""
        return self


def exchange_operator(
    schema: str, of_inputs: Callable[..., Any]
) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R]]:
    """Return a decorator for the body of an exchange, which takes an ``ExchangeSite`` and then tensors and numbers.

    Results of the body share no memory with its inputs. A result of None is an empty tensor in a graph.

    Args:
        schema: Name and signature without the site, in the language of torch.library.
        of_inputs: Makes empty results of the right shapes from the number of ranks and the other arguments.
    """

    def made(body: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
        name, _, rest = schema.partition("(")

        def run(tag: Tensor, size: int, *args: Any) -> Any:
            return _without_none(body(site_of(tag, name), *args), args[0])  # type: ignore[call-arg, arg-type]

        def empty(tag: Tensor, size: int, *args: Any) -> Any:
            return _without_none(of_inputs(size, *args), args[0])

        _LIBRARY.define(f"{name}(Tensor tag, int size, {rest}", tags=(torch.Tag.cudagraph_unsafe,))
        _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"shardwise::{name}", empty, lib=_LIBRARY)
        operator = getattr(torch.ops.shardwise, name).default

        def call(site: S, *args: P.args, **kwargs: P.kwargs) -> R:
            if torch.compiler.is_compiling():
                result: R = operator(site.tag, site.size, *args, **kwargs)
                return result
            return body(site, *args, **kwargs)

        return call

    return made


def site_of(tag: Tensor, operation: str) -> ExchangeSite:
    """Return the site with the number in ``tag``.

    Args:
        tag: The site's number, on the CPU.
        operation: Name of the operator in errors.

    Raises:
        CommError: If the site ended with its model.
    """
    site = _SITES.get(int(tag))
    if site is None:
        raise CommError(
            f"{operation}: compiled code runs an exchange of a model that no longer exists; keep the model as long as "
            "what was compiled of it, and the loss whose backward pass still has to run"
        )
    return site


def _without_none(results: Any, like: Tensor) -> Any:
    if isinstance(results, tuple):
        return tuple(_without_none(each, like) for each in results)
    return like.new_empty(0) if results is None else results
