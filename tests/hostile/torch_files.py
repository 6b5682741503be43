"""Files of ``torch.save`` on their way into safetensors: pickles that would run code, or say what is not there."""

import io
import pickle
import random
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from shardwise.formats.safetensors import SafetensorsWriter, read_header
from shardwise.models.torch_file import read_torch_file

from .trial import Case, Kind, of_bytes


def good() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(4, 3, generator=generator), torch.randn(5, generator=generator)
    return {
        "model": {"a": a, "b": b.half(), "tied": a},
        "moments": [torch.arange(6).view(2, 3), b],
        "epoch": 3,
    }


def make(folder: Path) -> Path:
    torch.save(good(), folder / "x.pt")
    return folder / "x.pt"


def read(path: Path) -> Any:
    """What ``shardwise convert x.pt x.safetensors`` leaves."""
    tensors, left_out = read_torch_file(path)
    out = path.with_suffix(".safetensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    with SafetensorsWriter(out, shapes, {name: tensor.dtype for name, tensor in tensors.items()}) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    return sorted(
        (name, stored.shape, str(stored.dtype), stored.read(0, stored.elements).double().tolist())
        for name, stored in read_header(out).items()
    ), left_out


class _Calls:
    """Pickles as a call of anything."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call


def holding(name: str, content: Any, may_differ: bool = False) -> Case:
    return Case(name, lambda path: torch.save(content() if callable(content) else content, path), may_differ)


def cyclic() -> dict[str, Any]:
    one: dict[str, Any] = {"t": torch.ones(2)}
    one["self"] = one
    return one


def laughs() -> Any:
    inner: Any = [torch.ones(1)]
    for _ in range(30):
        inner = [inner, inner]
    return inner


def deep() -> Any:
    inner: Any = torch.ones(1)
    for _ in range(300):
        inner = {"x": inner}
    return inner


def lawless() -> Iterator[Case]:
    """What cannot be written as it is."""
    one = torch.ones(1)
    yield holding("a dotted name twice", {"a": {"b": torch.ones(2)}, "a.b": torch.zeros(2)})
    yield holding("a number and its text", {1: torch.ones(2), "1": torch.zeros(2)})
    yield holding("the format's own name", {"__metadata__": one, "x": one})
    yield holding("expanded to 12 GB", {"x": one.expand(3 * 10**9)})
    yield holding("expanded to 40 TB", {"x": one.expand(10**13)})
    yield holding(
        "many names for one", {str(i): torch.ones(2000).view(-1) for i in range(5)}, may_differ=True
    )
    shared = torch.ones(100_000)
    yield holding("1000 names for one", lambda: {str(i): shared for i in range(1000)})
    yield holding("a cycle", cyclic)
    yield holding("a list in itself", lambda: (lambda one: (one.append(one), {"x": one})[1])([]))
    yield holding("a billion paths", laughs)
    yield holding("deep", deep)
    yield holding("sparse", {"x": torch.eye(3).to_sparse()})
    yield holding("complex128", {"x": torch.ones(2, dtype=torch.complex128)})
    yield holding("meta", {"x": torch.empty(10**12, device="meta")})
    yield holding("a key that is a tuple", {(1, 2): one})
    yield holding("escape codes", {"\x1b]0;t\x07": one})
    yield holding("a lone surrogate", {"\ud800": one})
    yield holding("one tensor", one)
    yield holding("nothing", {})
    yield holding("no tensors", {"a": 1, "b": "x"})
    yield holding("a set", {"a": one, "s": {1, 2}}, may_differ=True)
    yield holding("code", {"x": _Calls(print, "run")})
    yield holding("a file", lambda: {"x": _Calls(open, "/tmp/never", "w")})
    yield holding("a module", {"x": torch.nn.Linear(2, 2)})
    yield holding("bytearray of 8 GB", {"x": _Calls(bytearray, 8 << 30), "t": one})


def repacked(change: Callable[[str, bytes], bytes], pack: int = zipfile.ZIP_STORED) -> Callable[[Path], None]:
    """The archive again, each part changed."""

    def damage(path: Path) -> None:
        with zipfile.ZipFile(path) as archive:
            parts = [(entry.filename, archive.read(entry)) for entry in archive.infolist()]
        with zipfile.ZipFile(path, "w", pack) as archive:
            for name, data in parts:
                archive.writestr(name, change(name, data))

    return damage


def cases(count: int) -> Iterator[Case]:
    yield from lawless()
    yield Case("compressed", repacked(lambda name, data: data, zipfile.ZIP_DEFLATED))
    bomb = bytes(200 << 20)
    yield Case(
        "a bomb",
        repacked(lambda name, data: bomb if name.endswith("/0") else data, zipfile.ZIP_DEFLATED),
    )
    yield Case("storage cut", repacked(lambda name, data: data[:8] if name.endswith("/0") else data))
    yield Case("storage gone", repacked(lambda name, data: b"" if name.endswith("/0") else data))
    yield Case("plain pickle", lambda path: path.write_bytes(pickle.dumps({"a": 1})) and None)
    yield Case(
        "plain pickle of code", lambda path: path.write_bytes(pickle.dumps(_Calls(print, "x"))) and None
    )

    def old_form(path: Path) -> None:
        torch.save(good(), path, _use_new_zipfile_serialization=False)

    yield Case("the form before 1.6", old_form)
    yield Case("a folder", lambda path: (path.unlink(), path.mkdir())[1])
    for number in range(count):
        draws = random.Random(f"torch {number}")
        if number % 2:
            case = of_bytes(draws)
            yield Case(f"zip: {case.name}", case.damage)
        else:
            seed = draws.getrandbits(32)

            def change(name: str, data: bytes, seed: int = seed) -> bytes:
                if not name.endswith("data.pkl"):
                    return data
                noise = random.Random(seed)
                out = io.BytesIO(data)
                for _ in range(noise.randint(1, 3)):
                    out.seek(noise.randrange(len(data)))
                    out.write(bytes([noise.randrange(256)]))
                return out.getvalue()

            yield Case(f"pickle {number}", repacked(change), may_differ=True)


KIND = Kind("torch", make, read, cases)
