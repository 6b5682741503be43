"""The user's parameters of one bucket, and the memory that they show.

``p.data = view`` keeps the Parameter object, its hooks and its version counter.

[Note: stale memory]
While a weight is sharded its parameters are withheld (passes/absent.py): an operation on one is an error that names the
parameter, while shape, dtype and device can be read. Past torch's Python functions a withheld parameter reads as NaN of
the right shape. Its version counter is one above the value under which autograd saved the parameter; unsharding
restores both. So a backward pass that uses a weight that is not in memory fails in autograd's own check.

Cost: a quarter of a microsecond per parameter and move; no memory but the views.
"""

import weakref
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor, nn

from shardwise.base.errors import UsageError
from shardwise.memory.watched import unwatch_data, watch_data
from shardwise.passes.absent import expect, give, withhold
from shardwise.plan.unit import Bucket

_set_versions: Callable[[Sequence[Tensor], Sequence[int]], None]
_set_versions = torch._C._autograd._unsafe_set_version_counter  # type: ignore[assignment]


class ParameterViews:
    """The user's parameters of one bucket, and the memory that they show.

    Args:
        layout: The bucket.
        parameters: The parameters, in the order of the bucket's slots.
        what: Name of the bucket in errors.
        dtype: The compute dtype.
        device: The device of the computation.
    """

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
        """The tensor that each parameter shows while it is withheld."""
        self._what = what
        self._cached: dict[int, tuple[Tensor, list[Tensor]]] = {}
        self._withheld: dict[type, type] = {}
        self._expected: dict[type, type] = {}
        self.is_away = False
        """True while the whole engine's weights are moved off the device (engine/state/away.py)."""
        self._watched: dict[type, type] = {}
        self._read: dict[int, Tensor | None] = {}
        """Parameters, by identity, whose ``data`` was read since their values last changed, with a copy from
        before."""
        self._fresh = [parameter._version for parameter in parameters]
        self._stale = [version + 1 for version in self._fresh]

    def of(self, full: Tensor) -> list[Tensor]:
        """Return the parameters as views of a full flat buffer that persists; views are made once per buffer."""
        # Keyed by the identity of the object, which the cache keeps alive: a fake tensor has no address.
        found = self._cached.get(id(full))
        if found is None:
            with torch.inference_mode(False):
                found = self._cached[id(full)] = full, self.fresh(full)
        return found[1]

    def fresh(self, full: Tensor) -> list[Tensor]:
        """Return the parameters as views of a full flat buffer, without keeping the views."""
        return [
            full[slot.offset : slot.offset + slot.elements].view(slot.shape) for slot in self.layout.slots
        ]

    def forget(self) -> None:
        """Drop the kept views, so that the memory of their buffers can be released."""
        self._cached.clear()

    def point_into(self, full: Tensor) -> None:
        """Let the parameters show ``full``, a buffer that persists."""
        give(self.parameters)
        for parameter, view in zip(self.parameters, self.of(full), strict=True):
            parameter.data = view

    def expect(self, arrive: Callable[[], None]) -> None:
        """Make every use of the parameters wait, because their values are still in flight.

        Args:
            arrive: Function that the first use calls; it waits and then calls ``show``. It must be the same in
                every call of ``expect`` on this object.
        """
        expect(self.parameters, arrive, self._expected)

    def show(self) -> None:
        """Let the parameters be used again, because their values have arrived."""
        give(self.parameters)

    def watch(self, keeps_copies: bool) -> None:
        """Record from now on which parameters' ``data`` is read.

        Args:
            keeps_copies: True to also keep a copy of the values before the read.
        """
        # A weak reference: else the class that ``watch_data`` makes would keep this object's memory alive.
        of = weakref.ref(self)

        def seen(parameter: Tensor) -> None:
            views = of()
            if views is not None and id(parameter) not in views._read:
                with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                    views._read[id(parameter)] = parameter.clone() if keeps_copies else None

        watch_data(self.parameters, seen, self._watched)

    def unwatch(self) -> None:
        """Stop recording reads of ``data``."""
        unwatch_data(self.parameters)

    def perhaps_edited(self) -> list[int]:
        """Return the indices of the parameters that were edited, or whose ``data`` was read, since the last change."""
        return [
            place
            for place, (parameter, version) in enumerate(zip(self.parameters, self._fresh, strict=True))
            if parameter._version != version or id(parameter) in self._read
        ]

    def restore_versions(self) -> None:
        """Restore the version counters, because the values that autograd may have saved are in memory again.

        See [Note: stale memory].
        """
        _set_versions(self.parameters, self._fresh)

    def withhold(self, places: Collection[int] | None = None) -> None:
        """Let parameters show nothing. See [Note: stale memory].

        Args:
            places: Indices of the parameters in the bucket; None for all.
        """
        parameters, nothing, stale = self.parameters, self.absent, self._stale
        if places is not None:
            parameters, nothing, stale = ([each[i] for i in places] for each in (parameters, nothing, stale))  # type: ignore[assignment]
        give(parameters)
        for parameter, shown in zip(parameters, nothing, strict=True):
            parameter.data = shown
        withhold(parameters, self._said_of_withheld, self._withheld)
        _set_versions(parameters, stale)

    def renew(self, is_shown: bool) -> None:
        """Advance the version counters, because the values changed and what autograd saved before is stale.

        Args:
            is_shown: True if the parameters show the values now, False if they are withheld.
        """
        self._fresh = [version + 2 for version in self._fresh]
        self._stale = [version + 1 for version in self._fresh]
        _set_versions(self.parameters, self._fresh if is_shown else self._stale)
        self._read.clear()

    def check(self, full: Tensor, overwritten_by: torch.dtype | None) -> None:
        """Check that the user did not replace or edit parameters in a way that would be lost silently.

        Args:
            full: The full flat buffer that the parameters show.
            overwritten_by: Dtype of the separate master that would overwrite an edit, or None if there is no
                such master.

        Raises:
            UsageError: If a parameter lies in other memory, or was edited beside its master.
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
        if self.layout.key.gather_dtype is not None:
            return (
                f"parameter {names[0] if names else ''!r} of {self._what}, which is gathered in fp8 for the products "
                "of its layer alone (precision.linear: fp8),\n"
                "Name the layer in precision.fp8_skip, or look at weights, and edit them, inside "
                "engine.full_parameters()"
            )
        return (
            f"parameter {names[0] if names else ''!r} of {self._what}, which is released now,\n"
            "At ZeRO stage 3 and with offload.parameters weights are there while the forward pass of their Unit runs. "
            "Call the module's forward, which gathers them; name one Unit around what belongs together (zero.units); "
            "call other methods through engine.run(...); or look at weights, and edit them, inside "
            "engine.full_parameters()"
        )


def _bits(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, so that NaN compares equal to itself."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def absent(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of the given shape in the memory of one element.

    Args:
        shape: The shape.
        dtype: The dtype.
        device: The device.

    Returns:
        NaN everywhere; for integers the lowest number of the dtype, for booleans False.
    """
    value = (
        float("nan") if dtype.is_floating_point else (0 if dtype == torch.bool else torch.iinfo(dtype).min)
    )
    return torch.full((), value, dtype=dtype, device=device).expand(shape)
