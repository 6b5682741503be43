"""Deterministic algorithms: the switches of torch that an engine with ``deterministic: true`` turns on.

Some kernels of a device add by atomics, in an order that differs from run to run: the backward pass of flash
attention adds the gradient of the queries so, ``index_add`` and ``scatter_add`` their rows, and cuDNN chooses between
algorithms by timing them. With the key, every engine asks for

    torch.use_deterministic_algorithms(True)   kernels with a fixed order; an operation without one is an error
    torch.backends.cudnn.deterministic         True
    torch.backends.cudnn.benchmark             False
    CUBLAS_WORKSPACE_CONFIG                    :4096:8, unless the variable is set; read when cuBLAS is first used

The switches belong to the process and not to an engine. They are on while at least one engine that asked for them is
open, and the end of the last such engine restores the values that the first one found. The variable stays set.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from shardwise.base.errors import ConfigError
from shardwise.comm.rendezvous.environment import CUBLAS_WORKSPACE, FIXED_WORKSPACE, set_cublas_workspace
from shardwise.memory.leftovers import LEFTOVERS

_REFUSED = "deterministic"
"""The word that every error of torch about an operation without a deterministic implementation contains."""
_SWITCH = "torch.use_deterministic_algorithms"


class _Switches(NamedTuple):
    """Values of torch's switches in this process."""

    is_on: bool
    warns_only: bool
    cudnn_deterministic: bool
    cudnn_benchmark: bool

    @classmethod
    def current(cls) -> "_Switches":
        return cls(
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.backends.cudnn.deterministic,
            torch.backends.cudnn.benchmark,
        )

    def apply(self) -> None:
        torch.use_deterministic_algorithms(self.is_on, warn_only=self.warns_only)
        torch.backends.cudnn.deterministic = self.cudnn_deterministic
        torch.backends.cudnn.benchmark = self.cudnn_benchmark


_ON = _Switches(is_on=True, warns_only=False, cudnn_deterministic=True, cudnn_benchmark=False)


class _ProcessSwitches:
    """The number of holders of the switches in this process, and the values before the first holder."""

    def __init__(self) -> None:
        self._holders = 0
        self._found = _ON

    def turn_on(self) -> None:
        if not self._holders:
            self._found = _Switches.current()
        self._holders += 1
        _ON.apply()

    def release(self) -> None:
        self._holders -= 1
        if not self._holders:
            self._found.apply()


_SWITCHES = _ProcessSwitches()


class DeterministicMode:
    """The hold of one engine on the switches, from its construction to ``end``.

    The switches of an engine that was dropped without ``close`` are restored when the next engine is built.
    """

    def __init__(self) -> None:
        _SWITCHES.turn_on()
        self.end: Callable[[], None] = LEFTOVERS.keep(self, _SWITCHES.release)
        """Releases the hold, and restores the switches if no other engine holds them; a second call does nothing."""


def prepare_cublas(device: torch.device, product: Callable[[torch.device], object] | None = None) -> None:
    """Set the variable that cuBLAS reads, and check that cuBLAS was not used before without it.

    Call this function while the switches are on, because torch checks the variable only then.

    Args:
        device: The device of this rank; nothing is done unless its type is "cuda".
        product: A function that multiplies two matrices on the device. None: a product of torch.

    Raises:
        ConfigError: if the variable is set too late, or to a value for which cuBLAS has no fixed order.
    """
    if device.type != "cuda":
        return
    value = set_cublas_workspace()
    try:
        (product or _product)(device)
    except RuntimeError as error:
        if CUBLAS_WORKSPACE not in str(error):
            raise
        raise ConfigError(
            f"config: deterministic is true on {device}, and cuBLAS was used before initialize without "
            f"{CUBLAS_WORKSPACE}={FIXED_WORKSPACE}, or the variable has another value (now {value}); export "
            f"{CUBLAS_WORKSPACE}={FIXED_WORKSPACE} before the program starts"
        ) from None


def note_the_key(error: BaseException) -> None:
    """Add a note that names the key to an error about an operation without a deterministic implementation."""
    text = str(error)
    if _SWITCH in text and _REFUSED in text and torch.are_deterministic_algorithms_enabled():
        error.add_note(
            "config: deterministic: true turns this switch on while the engine is open; use another operation, or "
            "leave the key out and accept sums whose last bits differ from run to run"
        )


def _product(device: torch.device) -> torch.Tensor:
    return torch.mm(*(torch.ones(2, 2, device=device) for _ in range(2)))
