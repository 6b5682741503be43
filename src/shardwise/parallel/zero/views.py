"""The user's parameters of one bucket: the memory that they show.

``p.data = view`` leaves the Parameter object, its hooks and its version counter where they are.

[Note: stale memory]
While a weight is sharded its parameters are withheld (memory/absent.py): an operation that takes one is an error which
names it, where shape, dtype and device can be read. Past torch's Python functions they read as NaN of the right shape.
And their version counters stand one above the value under which autograd saved them; unsharding restores both, so a
backward pass that reaches a weight which is not there fails in autograd's own check.

Cost: a quarter of a microsecond per parameter and move; no memory but the views.
"""

import weakref
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor, nn

from shardwise.memory.absent import expect, give, withhold
from shardwise.memory.watched import unwatch_data, watch_data
from shardwise.plan.errors import UsageError
from shardwise.plan.unit import Bucket

_set_versions: Callable[[Sequence[Tensor], Sequence[int]], None]
_set_versions = torch._C._autograd._unsafe_set_version_counter  # type: ignore[assignment]


class ParameterViews:
    """See the module's docstring. ``what`` names the bucket in errors; ``dtype`` is the compute dtype."""

    def __init__(
        self,
        layout: Bucket,
        parameters: list[nn.Parameter],
        what: str,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.layout = layout
        self.parameters = parameters
        self.absent = [absent(slot.shape, dtype, device) for slot in layout.slots]
        """What each parameter shows while it is withheld."""
        self._what = what
        self._cached: dict[int, tuple[Tensor, list[Tensor]]] = {}
        self._withheld: dict[type, type] = {}
        self._expected: dict[type, type] = {}
        self.is_away = False
        """Whether the whole engine's weights are elsewhere (engine/away.py)."""
        self._watched: dict[type, type] = {}
        self._read: dict[int, Tensor | None] = {}
        """Parameters, by identity, whose ``data`` was read since the values changed last, and what they held then."""
        self._fresh = [parameter._version for parameter in parameters]
        self._stale = [version + 1 for version in self._fresh]

    def of(self, full: Tensor) -> list[Tensor]:
        """The parameters as views of a whole flat buffer that stays; made once per buffer."""
        # By the object, which the cache keeps alive: a fake tensor has no address.
        found = self._cached.get(id(full))
        if found is None:
            with torch.inference_mode(False):
                found = self._cached[id(full)] = full, self.fresh(full)
        return found[1]

    def fresh(self, full: Tensor) -> list[Tensor]:
        """As ``of`` for memory that will not be seen again."""
        return [
            full[slot.offset : slot.offset + slot.elements].view(slot.shape) for slot in self.layout.slots
        ]

    def forget(self) -> None:
        """Buffers that were seen may be given back: their views are not kept any more."""
        self._cached.clear()

    def point_into(self, full: Tensor) -> None:
        """The parameters show ``full``, a buffer that stays."""
        give(self.parameters)
        for parameter, view in zip(self.parameters, self.of(full), strict=True):
            parameter.data = view

    def expect(self, arrive: Callable[[], None]) -> None:
        """What the parameters show is on its way: whoever uses it calls ``arrive`` first, the same in every call here,
        and that calls ``show``."""
        expect(self.parameters, arrive, self._expected)

    def show(self) -> None:
        """It has come."""
        give(self.parameters)

    def watch(self, keeps_copies: bool) -> None:
        """Note from now on whose ``data`` is read; ``keeps_copies``: and what it held before."""
        of = weakref.ref(self)  # a class is no reason for memory to stay

        def seen(parameter: Tensor) -> None:
            views = of()
            if views is not None and id(parameter) not in views._read:
                with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                    views._read[id(parameter)] = parameter.clone() if keeps_copies else None

        watch_data(self.parameters, seen, self._watched)

    def unwatch(self) -> None:
        """End ``watch``."""
        unwatch_data(self.parameters)

    def perhaps_edited(self) -> list[int]:
        """Return the places of the parameters that were edited, or whose ``data`` was read, since the values changed
        last."""
        return [
            place
            for place, (parameter, version) in enumerate(zip(self.parameters, self._fresh, strict=True))
            if parameter._version != version or id(parameter) in self._read
        ]

    def restore_versions(self) -> None:
        """Values are back that autograd may have saved. [Note: stale memory]"""
        _set_versions(self.parameters, self._fresh)

    def withhold(self, places: Collection[int] | None = None) -> None:
        """The parameters at ``places`` (default: all) show nothing. [Note: stale memory]"""
        parameters, nothing, stale = self.parameters, self.absent, self._stale
        if places is not None:
            parameters, nothing, stale = ([each[i] for i in places] for each in (parameters, nothing, stale))  # type: ignore[assignment]
        give(parameters)
        for parameter, shown in zip(parameters, nothing, strict=True):
            parameter.data = shown
        withhold(parameters, self._said_of_withheld, self._withheld)
        _set_versions(parameters, stale)

    def renew(self, is_shown: bool) -> None:
        """The values changed: what autograd saved before may not be used any more."""
        self._fresh = [version + 2 for version in self._fresh]
        self._stale = [version + 1 for version in self._fresh]
        _set_versions(self.parameters, self._fresh if is_shown else self._stale)
        self._read.clear()

    def check(self, full: Tensor, overwritten_by: torch.dtype | None) -> None:
        """What the user did to a parameter behind the engine's back would be lost in silence.

        ``overwritten_by``: dtype of the master that an edit in place does not reach; None where there is no such one.
        Errors: UsageError.
        """
        for slot, parameter, view, version in zip(
            self.layout.slots, self.parameters, self.of(full), self._fresh, strict=True
        ):
            if parameter.data_ptr() != view.data_ptr():
                raise UsageError(
                    f"{self._what}: parameter {slot.name} does not lie in the engine's memory any more, so it would "
                    "not train. Move or convert the model (model.to(), .half(), p.data = ...) before initialize()"
                )
            before = self._read.get(id(parameter))
            is_edited = parameter._version != version or (
                before is not None and not torch.equal(_bits(before), _bits(view))
            )
            if overwritten_by is not None and is_edited:
                raise UsageError(
                    f"{self._what}: parameter {slot.name} was changed in place, which its {overwritten_by} master "
                    "would overwrite. Edit inside engine.full_parameters(write=True), or load before initialize()"
                )

    def _said_of_withheld(self, parameter: nn.Parameter) -> str:
        names = [s.name for s, p in zip(self.layout.slots, self.parameters, strict=True) if p is parameter]
        if self.is_away:
            return (
                f"parameter {names[0] if names else ''!r} of {self._what}, which engine.offload_states() has moved,\n"
                "Call engine.reload_states() first"
            )
        return (
            f"parameter {names[0] if names else ''!r} of {self._what}, which is released now,\n"
            "At ZeRO stage 3 and with offload.parameters weights are there while the forward pass of their Unit runs. "
            "Call the module's forward, which gathers them; name one Unit around what belongs together (zero.units); "
            "call other methods through engine.run(...); or look at weights, and edit them, inside "
            "engine.full_parameters()"
        )


def _bits(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, by which NaN equals itself."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def absent(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of that shape in the memory of one element: NaN, or the lowest number of an integer dtype."""
    value = (
        float("nan") if dtype.is_floating_point else (0 if dtype == torch.bool else torch.iinfo(dtype).min)
    )
    return torch.full((), value, dtype=dtype, device=device).expand(shape)
