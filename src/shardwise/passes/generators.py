"""The random generators that a forward pass may draw from: reading, comparing, restoring, deriving and sending states.

    torch     the default generator of the host, and of each device
    python    the functions of ``random``
    numpy     the functions of ``numpy.random``
    others    ``torch.Generator``, ``random.Random`` and numpy's generators that modules hold in attributes

Cost: a state of torch's takes 2 µs to read, Python's 10 µs, numpy's 50 µs. The last two are read in the first
      ``_LOOKS`` passes of an object, and later only if one of these passes drew from them.
"""

import base64
import hashlib
import json
import random
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

States = dict[str, Any]
"""The state of each generator, by its name."""
_LOOKS = 8
_SLOW = ("python", "numpy")
_OWN = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def own_generators(module: nn.Module) -> dict[str, Any]:
    """Return the generators that ``module`` and the modules inside hold in attributes, by name."""
    return {
        f"{name}.{key}" if name else key: value
        for name, inner in module.named_modules()
        for key, value in vars(inner).items()
        if isinstance(value, _OWN)
    }


class RandomGenerators:
    """The default generators, those of devices, and generators in attributes of a model.

    Args:
        devices: Devices whose generators are included; devices without generators of their own are left out.
        own: Generators in attributes, by name.
    """

    def __init__(self, devices: Iterable[torch.device] = (), own: Mapping[str, Any] | None = None):
        self._devices = {str(each): each for each in devices if _has_states(each)}
        self._own = dict(own or {})
        self._looks = 0
        self._slow: set[str] = set()
        """Generators of Python and numpy from which a pass has drawn."""

    @property
    def _is_new(self) -> bool:
        return self._looks < _LOOKS

    def look(self) -> States:
        """Return the states at the beginning of a pass, and count the pass."""
        self._looks += 1
        slow = _SLOW if self._looks <= _LOOKS else self._slow
        return self.states(slow)

    def states(self, slow: Iterable[str] = _SLOW) -> States:
        """Return the present states; of Python's and numpy's generators only those in ``slow``."""
        found: States = {"torch": torch.get_rng_state()}
        for name, device in self._devices.items():
            found[name] = torch.get_device_module(device).get_rng_state(device)
        if "python" in slow:
            found["python"] = random.getstate()
        if "numpy" in slow:
            found["numpy"] = np.random.get_state(legacy=False)
        for name, generator in self._own.items():
            found[f"own {name}"] = _state_of(generator)
        return found

    def drawn(self, before: States) -> list[str]:
        """Return the names of the generators whose state differs from the state in ``before``."""
        now = self.states([name for name in _SLOW if name in before])
        names = [name for name, state in before.items() if not _equal(state, now[name])]
        self._slow.update(name for name in names if name in _SLOW)
        return names

    def put(self, states: States) -> None:
        """Set the generators in ``states`` to these states."""
        for name, state in states.items():
            if name == "torch":
                torch.set_rng_state(state)
            elif name == "python":
                random.setstate(state)
            elif name == "numpy":
                np.random.set_state(state)
            elif name in self._devices:
                device = self._devices[name]
                torch.get_device_module(device).set_rng_state(state, device)
            elif name.startswith("own "):
                _set(self._own[name.removeprefix("own ")], state)

    def seed(self, key: str, names: Iterable[str]) -> None:
        """Set the generators ``names`` to states that depend only on ``key`` and the generator's name."""
        for name in names:
            number = int.from_bytes(
                hashlib.blake2b(f"{key} {name}".encode(), digest_size=7).digest(), "little"
            )
            if name == "torch":
                torch.default_generator.manual_seed(number)
            elif name == "python":
                random.seed(number)
            elif name == "numpy":
                np.random.seed(number % 2**32)
            elif name in self._devices:
                device = self._devices[name]
                made = torch.Generator(device).manual_seed(number)
                torch.get_device_module(device).set_rng_state(made.get_state(), device)
            else:
                _seed(self._own[name.removeprefix("own ")], number)


def _has_states(device: torch.device) -> bool:
    """Return True if ``device`` has a random generator of its own whose states can be read and made."""
    if device.type in ("cpu", "meta"):
        return False
    try:
        torch.get_device_module(device).get_rng_state(device)
        torch.Generator(device)
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return True


def pack(states: States) -> bytes:
    """Return ``states`` as bytes that can be sent: JSON, with arrays as base64."""
    return json.dumps(states, default=_encoded).encode()


def unpack(data: bytes) -> States:
    """Return the states that ``pack`` encoded."""
    found: States = json.loads(data, object_hook=_decoded)
    for name, state in found.items():
        if isinstance(state, list):  # of random.Random: JSON has turned a nested tuple into lists
            found[name] = tuple(tuple(each) if isinstance(each, list) else each for each in state)
    return found


def _encoded(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    is_tensor = isinstance(value, Tensor)
    array = value.cpu().numpy() if is_tensor else value
    return {
        "tensor": is_tensor,
        "dtype": str(array.dtype),
        "bytes": base64.b64encode(array.tobytes()).decode(),
    }


def _decoded(value: dict[str, Any]) -> Any:
    if set(value) != {"tensor", "dtype", "bytes"}:
        return value
    array = np.frombuffer(base64.b64decode(value["bytes"]), dtype=value["dtype"]).copy()
    return torch.from_numpy(array) if value["tensor"] else array


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.bit_generator.state


def _set(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator | np.random.RandomState):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.bit_generator.state = state


def _seed(generator: Any, number: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(number)
    elif isinstance(generator, random.Random):
        generator.seed(number)
    elif isinstance(generator, np.random.RandomState):
        generator.seed(number % 2**32)
    else:
        generator.bit_generator.state = type(generator.bit_generator)(number).state


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return bool(np.array_equal(a, b))
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    return bool(a == b)


def copied(generator: Any) -> Any:
    """Return a separate generator with the present state of ``generator``."""
    if isinstance(generator, torch.Generator):
        made = torch.Generator(generator.device)
        made.set_state(generator.get_state())
        return made
    if isinstance(generator, np.random.Generator):
        bits = type(generator.bit_generator)()
        bits.state = generator.bit_generator.state
        return np.random.Generator(bits)
    made = type(generator)()
    _set(made, _state_of(generator))
    return made
