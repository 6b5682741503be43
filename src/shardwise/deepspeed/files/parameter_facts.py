"""The attributes that DeepSpeed gives the parameters of a model at stage 3.

    p.ds_id        number of the parameter          p.ds_status    AVAILABLE while its weights are on this rank
    p.ds_shape     shape of the whole parameter     p.ds_numel     elements of the whole parameter
    p.ds_tensor    this rank's own elements, flat, in the compute dtype (a copy)

The attributes are properties of a class that ``mark`` mixes into the class of each parameter, as passes/absent.py
does with its own marker classes; no attribute is set on a tensor. ``unmark`` removes them when the engine closes.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from shardwise.deepspeed.calls.enums import ZeroParamStatus
from shardwise.passes.absent import ExpectedParameter, WithheldParameter, mix_in, take_out


class ParameterNumbers:
    """The engine of marked parameters, with the name and number of each parameter."""

    def __init__(self, engine: Any):
        self.engine = engine
        parameters = dict(engine.module.named_parameters())
        self.names = {id(parameter): name for name, parameter in parameters.items()}
        self.numbers = {id(parameter): number for number, parameter in enumerate(parameters.values())}


class PartitionedParameter:
    """A class with DeepSpeed's attributes, mixed into the class of the parameters of one engine at stage 3."""

    _numbers: ClassVar[ParameterNumbers]

    @property
    def ds_id(self) -> int:
        """The number of the parameter in the model.

        Raises:
            AttributeError: for a copy of a parameter, which belongs to no engine.
        """
        found = self._numbers.numbers.get(id(self))
        if found is None:  # a copy of the parameter
            raise AttributeError("ds_id: this parameter belongs to no engine")
        return found

    @property
    def ds_status(self) -> ZeroParamStatus:
        """AVAILABLE if the weights are on this rank now, INFLIGHT while they are being gathered, else NOT_AVAILABLE."""
        if isinstance(self, WithheldParameter):
            return ZeroParamStatus.NOT_AVAILABLE
        return ZeroParamStatus.INFLIGHT if isinstance(self, ExpectedParameter) else ZeroParamStatus.AVAILABLE

    @property
    def ds_shape(self) -> torch.Size:
        """The shape of the whole parameter."""
        return self.shape  # type: ignore[attr-defined, no-any-return]

    @property
    def ds_numel(self) -> int:
        """The number of elements of the whole parameter."""
        return self.numel()  # type: ignore[attr-defined, no-any-return]

    @property
    def ds_tensor(self) -> Tensor | None:
        """A copy of this rank's own elements, flat, in the compute dtype; None if no engine has the parameter."""
        name = self._numbers.names.get(id(self))
        return None if name is None else self._numbers.engine.ours.local_tensor(name, "parameter")

    @property
    def ds_persist(self) -> bool:
        """False: no parameter stays whole between passes."""
        return False

    @property
    def ds_active_sub_modules(self) -> set[int]:
        """An empty set: the step's list of Actions records which modules use a parameter."""
        return set()

    def ds_summary(self, *ignored: Any, **named: Any) -> dict[str, Any]:
        """Return the attributes in a dictionary, for a message."""
        return {
            "id": self.ds_id,
            "status": self.ds_status.name,
            "numel": self.ds_numel,
            "ds_numel": self.ds_numel,
            "shape": tuple(self.ds_shape),
            "ds_shape": tuple(self.ds_shape),
            "requires_grad": self.requires_grad,  # type: ignore[attr-defined]
        }


def mark(engine: Any) -> None:
    """Add the attributes of this module to the parameters of ``engine``, a DeepSpeedEngine."""
    numbers = ParameterNumbers(engine)
    mix_in(
        list(engine.module.parameters()), type("Partitioned", (PartitionedParameter,), {"_numbers": numbers})
    )


def unmark(parameters: list[nn.Parameter]) -> None:
    """Remove the attributes of this module from ``parameters``."""
    take_out(parameters, PartitionedParameter)
