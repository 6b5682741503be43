"""Calls on the model itself that scripts make by habit between passes: the correct result, or an error at once.

    call                              weights whole on the rank  cut (stage 3) or on a tier   tp or pp above 1
    model.state_dict(), torch.save    as ever                    engine.state_dict()          engine.state_dict()
    model.save_pretrained(folder)     as ever                    engine.save_pretrained       engine.save_pretrained
    model.load_state_dict(state)      if no separate master      engine.load_state_dict       engine.load_state_dict
                                      would overwrite it
    copy.deepcopy(model), EMA         a plain model              engine.full_parameters()     a new model
    torch.save(model), pickle         refused: the pickle would contain functions of the engine
    model.to(), .half(), .cpu() ...   refused unless nothing would change: no optimizer would update the new tensors

"as ever" also holds at stage 3 inside ``engine.full_parameters()``. The message of an error names the call of its table
cell.

The implementation uses torch's own means: hooks on state dicts, hooks with a ``__deepcopy__``, and an ``_apply``
attribute on the module, through which all conversions go.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.base.errors import UsageError
from shardwise.engine.parts.parts import EngineParts
from shardwise.engine.state import state
from shardwise.parallel.zero.hooks import unhooked

_ON_ALL = "on all ranks"


class ModuleGuards:
    """The hooks of one engine's model on state dicts, copies and conversions."""

    def __init__(self, parts: EngineParts):
        self._parts = parts
        self._handles: list[Any] = []

    def hook_state_dicts(self) -> None:
        """Register the hooks on state dicts and copies."""
        for name, module in self._parts.model.named_modules():
            has_weights = any(parameter is not None for parameter in module._parameters.values())
            if not has_weights and "forward" not in vars(module):
                continue
            saves = _StateDictHook(self, name, module, lambda: self._check_saving())
            loads = _StateDictHook(self, name, module, lambda: self._check_loading())
            self._handles += [
                module.register_state_dict_pre_hook(saves),
                module.register_load_state_dict_pre_hook(loads),
            ]

    def refuse_conversions(self) -> None:
        """Replace the ``_apply`` of the model and of its stages."""
        stages = [stage.module for stage in self._parts.stages]
        for module in {self._parts.model, *stages}:
            self._handles.append(_ConversionGuard(module, stages))

    def remove(self) -> None:
        """Remove the hooks from the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _in_pieces(self) -> str | None:
        """Return why this rank does not hold the whole model, None if it does."""
        parts = self._parts
        if parts.groups["model"].size > 1:
            return f"with mesh.tp {parts.mesh.tp} and mesh.pp {parts.mesh.pp} this rank holds a part of the model alone"
        if any(map(parts.slices.cut_axes, parts.registry.of_kind("parameter"))):
            return f"with mesh.ep {parts.mesh.ep} and mesh.etp {parts.mesh.etp} this rank holds some experts alone"
        has_windows = any(hooks.has_windows for hooks in parts.hooks)
        if has_windows and not all(bucket.weight.is_whole for bucket in state.buckets(parts)):
            settings = parts.config
            if settings.zero.stage == 3:
                return "at zero stage 3 the weights lie in pieces on all ranks"
            return f"with offload.parameters: {settings.offload.parameters} the weights lie there between their uses"
        return None

    def _check_saving(self) -> None:
        pieces = self._in_pieces()
        if pieces is not None:
            raise UsageError(
                f"model.state_dict(): {pieces}, and a file would hold no more. Call engine.state_dict() {_ON_ALL} and "
                "save what it returns on one of them (model.save_pretrained(folder, state_dict=...) takes it too), or "
                f"engine.save_pretrained(folder) {_ON_ALL}"
            )

    def _check_loading(self) -> None:
        pieces = self._in_pieces()
        held = state.buckets(self._parts)
        if pieces is None and all(bucket.weight.is_whole or bucket.weight.shares_master for bucket in held):
            return
        why = pieces or "the masters that the optimizer updates would overwrite what is loaded into the model"
        raise UsageError(
            f"model.load_state_dict(): {why}. Call engine.load_state_dict(state) {_ON_ALL} with the same state, or "
            "load before initialize()"
        )

    def check_copy(self, name: str, module: nn.Module) -> None:
        """Check that a copy of ``module`` would be an independent model.

        Args:
            name: name of the module in the model.
            module: the module.

        Raises:
            UsageError: if weights are cut, the module's forward is replaced, or the model has embedding tables.
        """
        pieces = self._in_pieces()
        if pieces is not None:
            instead = (
                "Copy inside engine.full_parameters()"
                if self._parts.groups["model"].size == self._parts.mesh.ep * self._parts.mesh.etp == 1
                else "Build a new model and load engine.state_dict() into it"
            )
            raise UsageError(
                f"copy.deepcopy(model): {pieces}. {instead} {_ON_ALL}, or copy before initialize()"
            )
        if "forward" in vars(module) or self._parts.tables:
            what = (
                f"the forward of module {name or '(root)'} was replaced (by recompute, compile or synchronized batch "
                "norm, say) and the copy would go on calling the original's"
                if "forward" in vars(module)
                else "embedding tables are not copied"
            )
            raise UsageError(
                f"copy.deepcopy(model): {what}. Copy before initialize(), or build a new model and load "
                "engine.state_dict() into it"
            )


class _StateDictHook:
    """A hook on state dicts, which a copy of the model replaces by a hook without effect."""

    def __init__(self, calls: ModuleGuards, name: str, module: nn.Module, check: Callable[[], None]):
        self._calls = calls
        self._name = name
        self._module = module
        self._check = check

    def __call__(self, *args: Any) -> None:
        self._check()

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        self._calls.check_copy(self._name, self._module)
        return unhooked

    def __reduce__(self) -> Any:
        raise UsageError(
            "torch.save(model), pickle: the engine's hooks hang on the model, and a pickle would be code. Save "
            "engine.state_dict(), or call engine.close() first"
        )


class _ConversionGuard:
    """A replacement of the ``_apply`` of one module, which refuses conversions of its tensors.

    A copy of the module gets the ``_apply`` of its class. Tensors of the module outside of the parts in ``here`` are
    stand-ins, which may be on any device.
    """

    def __init__(self, module: nn.Module, here: Sequence[nn.Module]):
        self._module = module
        self._here = here
        vars(module)["_apply"] = self

    def __call__(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Check that ``fn`` leaves every parameter and buffer as it is, and return the module.

        Raises:
            UsageError: if ``fn`` would change a parameter or buffer.
        """
        here = {id(each) for part in self._here for each in (*part.parameters(), *part.buffers())}
        for tensor in (*self._module.parameters(recurse), *self._module.buffers(recurse)):
            if id(tensor) not in here:
                continue
            probe = torch.zeros((2,) * min(tensor.dim(), 5), dtype=tensor.dtype, device=tensor.device)
            made = fn(probe)
            if made is not probe or (probe.device.type == "cpu" and probe.is_shared()):
                kind, place = str(made.dtype).removeprefix("torch."), made.device
                raise UsageError(
                    "model.to(), .half(), .float(), .cpu() and their like: the parameters are views of the engine's "
                    f"buffers ({str(tensor.dtype).removeprefix('torch.')} on {tensor.device}), and what a conversion "
                    f"makes of them ({kind} on {place}) would not train. Convert or move the model before "
                    "initialize(), say precision.compute and comm.device there, or call engine.close() first; "
                    "engine.state_dict() gives the weights on the CPU"
                )
        return self._module

    def remove(self) -> None:
        """Restore the ``_apply`` of the module's class."""
        vars(self._module).pop("_apply", None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self._module))
        if copied is None:
            raise UsageError(
                f"copy.deepcopy(model): {type(self._module).__name__} copies itself in a __deepcopy__ of its own that "
                "takes the engine's functions along. Copy before initialize(), or build a new model and load "
                "engine.state_dict() into it"
            )
        return type(copied)._apply.__get__(copied)

    def __reduce__(self) -> Any:
        raise UsageError(
            "torch.save(model), pickle: the engine's hooks hang on the model, and a pickle would be code. Save "
            "engine.state_dict(), or call engine.close() first"
        )
