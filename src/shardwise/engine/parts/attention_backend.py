"""Attention backends: the kernels that torch has for ``scaled_dot_product_attention`` while an engine is open.

    auto       NVIDIA, compute capability 9.x or 10.x, cuDNN 9.15.1 or newer:   cudnn, flash, efficient, math
               every other device, and deterministic: true:                    torch's choice, unchanged
    torch      torch's choice, unchanged
    names      the named kernels alone: on an NVIDIA device in the given order, on a CPU flash before math; a call that
               none of them serves is torch's error

    flash      fused, 16 bits on a device                   deterministic if torch's switch is on
    flash3     flash attention 3, of the package flash_attn_interface, for compute capability 9.x; the same
    cudnn      cuDNN's fused kernel, 16 bits                torch does not use it if its deterministic switch is on
    efficient  fused, also in fp32                          deterministic if torch's switch is on
    math       plain products; keeps the T x T scores       deterministic

torch 2.13 has the order of ``auto`` by itself on these devices; earlier releases have flash, efficient, math, cuDNN
everywhere. This repository has not measured any of the kernels on a device.

torch keeps the choice for the whole process, so it holds for every model of the process between ``initialize`` and
``close``: for recomputed blocks in a backward pass and for evaluation too. A model's own ``with sdpa_kernel(...)``
still wins inside. Open engines must agree.

torch compiles the chosen kernel into a graph and does not check later whether the choice is still the same. So compiled
code of the process is dropped, and compiled again at its next call, whenever an engine changes the choice.
"""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch.nn import attention
from torch.nn.attention import SDPBackend

from shardwise.base.errors import ConfigError
from shardwise.memory.leftovers import LEFTOVERS

_FLASH3_MODULE = "flash_attn_interface"
_KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "flash3": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_AUTO = ("cudnn", "flash", "efficient", "math")
"""The order of ``auto`` on devices on which cuDNN comes first."""
_CUDNN_FIRST = 91501
"""cuDNN's version from which its kernel comes first; torch 2.13 prefers it from the same version on."""
_UNSERVED = ("No available kernel", "No viable backend for scaled_dot_product_attention")
"""Beginnings of torch's errors about a call that no enabled kernel serves."""


class DeviceKernels(NamedTuple):
    """Properties of a device that determine which attention kernels it has."""

    type: str
    capability: tuple[int, int] = (0, 0)
    """NVIDIA's compute capability; (0, 0) for every other device."""
    has_flash: bool = False
    """True if torch was built with flash attention for the device."""
    cudnn_version: int = 0
    """cuDNN's version, as torch reports it: 91501 is 9.15.1; 0 without cuDNN."""
    has_flash3: bool = False
    """True if the package of flash attention 3 is installed."""

    @classmethod
    def of(cls, device: torch.device) -> "DeviceKernels":
        """Return the properties of ``device``."""
        if device.type != "cuda":
            return cls(device.type, has_flash=device.type == "cpu")
        is_nvidia = torch.version.hip is None
        return cls(
            device.type,
            torch.cuda.get_device_capability(device) if is_nvidia else (0, 0),
            torch.backends.cuda.is_flash_attention_available(),
            (torch.backends.cudnn.version() or 0) if is_nvidia and torch.backends.cudnn.is_available() else 0,
            is_nvidia and importlib.util.find_spec(_FLASH3_MODULE) is not None,
        )

    def has(self, name: str) -> bool:
        """Return True if the device has the kernel of a name in the configuration."""
        if name == "math":
            return True
        if name == "flash":
            return self.has_flash
        if name == "efficient":
            return self.type == "cuda"
        if name == "flash3":
            return self.has_flash3 and self.capability[0] == 9
        return self.cudnn_version >= 90000 and self.capability >= (8, 0)


def chosen_kernels(
    backend: str | Sequence[str], device: DeviceKernels, deterministic: bool
) -> tuple[str, ...]:
    """Return the names of the kernels to choose from, in order; none if torch's choice stays as it is.

    Args:
        backend: the key ``attention.backend``.
        device: the device of this rank.
        deterministic: the key ``deterministic``.

    Raises:
        ConfigError: if the device does not have a named kernel.
    """
    if backend == "torch":
        return ()
    if backend == "auto":
        is_preferred = device.capability[0] in (9, 10) and device.cudnn_version >= _CUDNN_FIRST
        return _AUTO if is_preferred and not deterministic else ()
    names = (backend,) if isinstance(backend, str) else tuple(backend)
    for name in names:
        if not device.has(name):
            there = ", ".join(each for each in _KERNELS if device.has(each))
            why = (
                f"; the package {_FLASH3_MODULE} is not installed"
                if name == "flash3" and not device.has_flash3
                else ""
            )
            raise ConfigError(
                f"attention.backend: {name}, but this device ({_described(device)}) does not have that kernel{why}; "
                f"it has {there}. Choose one of them, or auto"
            )
    return names


def _described(device: DeviceKernels) -> str:
    major, minor = device.capability
    return f"{device.type}, compute capability {major}.{minor}" if major else device.type


class _ProcessChoice:
    """The kernels that torch chooses from in this process, and the number of engines that hold the choice."""

    def __init__(self) -> None:
        self._holders = 0
        self._names: tuple[str, ...] = ()
        self._found = ExitStack()

    def hold(self, names: tuple[str, ...]) -> None:
        if self._holders and names != self._names:
            raise ConfigError(
                f"attention.backend: {', '.join(names)}, but another open engine of this process has "
                f"{', '.join(self._names)}, and torch has one choice for the process; close that engine first, or give "
                "both the same key"
            )
        if not self._holders:
            with ExitStack() as found:
                if "flash3" in names:
                    _activate_flash3(found)
                kernels = list(dict.fromkeys(_KERNELS[name] for name in names))
                before = attention._cur_sdpa_kernel_backends(with_priority=True)
                if "flash3" in names or kernels != before:
                    _drop_compiled_code()
                    found.callback(_drop_compiled_code)
                found.enter_context(attention.sdpa_kernel(kernels, set_priority=True))
                self._found, self._names = found.pop_all(), names
        self._holders += 1

    def release(self) -> None:
        self._holders -= 1
        if not self._holders:
            self._found.close()


def _drop_compiled_code() -> None:
    if "torch._dynamo" in sys.modules:  # slow to import, and nothing is compiled without it
        torch.compiler.reset()


def _activate_flash3(found: ExitStack) -> None:
    """Let flash attention be computed by version 3, until ``found`` is closed."""
    before = attention.current_flash_attention_impl()
    if before == "FA3":
        return
    attention.activate_flash_attention_impl("FA3")
    if before is None:
        found.callback(attention.restore_flash_attention_impl)
    else:
        found.callback(attention.activate_flash_attention_impl, before)


_CHOICE = _ProcessChoice()


class AttentionHold:
    """The hold of one engine on the choice of kernels, from its construction to ``end``.

    The choice of an engine that was dropped without ``close`` ends when the next engine is built.

    Args:
        names: the names of the kernels, in order.

    Raises:
        ConfigError: if another open engine holds another choice.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        _CHOICE.hold(names)
        self.end: Callable[[], None] = LEFTOVERS.keep(self, _CHOICE.release)
        """Releases the hold, and restores torch's choice if no other engine holds it; a second call does nothing."""


def note_the_backend(error: BaseException) -> None:
    """Add a note that names the key to torch's error about a call that no enabled attention kernel serves."""
    if str(error).startswith(_UNSERVED):
        error.add_note(
            "config: attention.backend leaves torch only the kernels that it names, and none of them serves this call: "
            "flash and cudnn need 16-bit tensors on a device, and flash takes no mask. Add efficient or math to the "
            "list, or set attention.backend: auto"
        )
