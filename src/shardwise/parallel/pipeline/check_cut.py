"""The check that the chain of stages computes what the whole model does, for a given call, before any stage runs."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from shardwise.base.errors import PlanError
from shardwise.parallel.pipeline.blocks import LIST, blocks_around
from shardwise.parallel.pipeline.cut import cut
from shardwise.parallel.pipeline.layers import Layers
from shardwise.parallel.pipeline.stand_in import tensors_of
from shardwise.parallel.pipeline.uses import ModuleUses


def check_cut(
    model: nn.Module, call: Callable[[nn.Module], Any], starts: Sequence[str], uses: ModuleUses | None = None
) -> None:
    """Run a call on the whole model and on the chain of its stages, and compare the results.

    Both run in evaluation mode and without gradients. On the meta device only shapes and dtypes are compared;
    the fillers' NaN still show in the first real pass. A model that draws random numbers in evaluation mode
    cannot be compared.

    Args:
        model: The model.
        call: Function that calls the model.
        starts: Name of the block that begins each stage but the first.
        uses: Order in which the model uses its modules, or None for the order of registration.

    Raises:
        PlanError: If a stage cannot run or its output differs; the error names the first such stage.
    """
    stages = len(starts) + 1
    if stages == 1:
        return
    with _evaluating(model), torch.no_grad():
        modules = cut(model, starts, range(stages), uses)
        if isinstance(model, Layers):  # its layers are built only on the rank of their stage
            model = cut(model, (), [0])[0].module.eval()
        wanted = _outputs(model, call, starts)
        received: Any = None
        for stage, module in modules.items():
            module.module.eval()
            try:
                received = module.run(call, received)
            except PlanError:
                raise
            except Exception as error:
                raise PlanError(
                    f"stage {stage} of {stages} cannot run the model's own forward pass: {type(error).__name__}: "
                    f"{error}. Cut elsewhere (pipeline.partition), {LIST}"
                ) from error
            difference = _difference(received, wanted[stage])
            if difference:
                raise PlanError(
                    f"stage {stage} of {stages} ({_span(starts, stage)}) does not compute what the whole model does: "
                    f"{difference}. More than one block's output passes from block to block, or parts run in another "
                    f"order than they are registered in. Cut elsewhere (pipeline.partition), {LIST}"
                )


def _span(starts: Sequence[str], stage: int) -> str:
    first = f"from {starts[stage - 1]}" if stage else "from the beginning"
    return f"{first} to before {starts[stage]}" if stage < len(starts) else f"{first} to the end"


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _outputs(model: nn.Module, call: Callable[[nn.Module], Any], starts: Sequence[str]) -> list[Any]:
    """Return the value that leaves each stage in the whole model; the last is the result."""
    blocks = blocks_around(model, starts)
    ends = [blocks[blocks.index(start) - 1] for start in starts]
    found: dict[str, Any] = {}
    handles = [
        model.get_submodule(end).register_forward_hook(
            lambda module, args, output, end=end: found.update({end: _copied(output)})
        )
        for end in ends
    ]
    try:
        result = call(model)
    finally:
        for handle in handles:
            handle.remove()
    for end, start in zip(ends, starts, strict=True):
        if end not in found:
            raise PlanError(f"block {end!r} in front of {start!r} is never called, so no stage can end there")
    return [*(found[end] for end in ends), result]


def _copied(value: Any) -> Any:
    """Return a copy of the tensors, because later code may write into them in place."""
    return tree_map_only(Tensor, Tensor.clone, value)


def _difference(got: Any, wanted: Any) -> str:
    """Return a text on how two outputs differ, or "" if they are equal."""
    ours, theirs = list(tensors_of(got)), list(tensors_of(wanted))
    if len(ours) != len(theirs):
        return f"{len(ours)} tensors come out where the whole model has {len(theirs)}"
    for one, other in zip(ours, theirs, strict=True):
        if one.shape != other.shape or one.dtype != other.dtype:
            return f"{_kind(one)} comes out where the whole model has {_kind(other)}"
        if one.is_meta or other.is_meta:
            continue
        tolerance = 1e-9 if one.dtype in (torch.float64, torch.complex128) else 1e-4
        if not torch.allclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=False):
            distance = (
                (one.double() - other.double()).abs().max() if not one.is_complex() else torch.tensor(0.0)
            )
            return f"values differ by up to {float(distance):.3g}"
    return ""


def _kind(tensor: Tensor) -> str:
    return f"[{', '.join(map(str, tensor.shape))}] {str(tensor.dtype).removeprefix('torch.')}"
