"""What is in memory while an engine is made, and exported: with state on a disk a few Units, of however many."""

import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shardwise
from shardwise.base.errors import CheckpointError, UsageError
from shardwise.engine.state import state
from shardwise.formats.safetensors import StoredTensor
from shardwise.models import Gpt, GptPolicy
from shardwise.tiers.scratch import DiskScratch


class Allocated(TorchDispatchMode):
    """Bytes of the tensors that this thread makes inside, now and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.note(tensor)
        return out

    def note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if tensor.is_meta or storage._cdata in self._known:
            return
        self._known.add(storage._cdata)
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())

    def _forget(self, address: int, size: int) -> None:
        self._known.discard(address)
        self.now -= size


LAYERS = 40
POLICY = GptPolicy(layers=LAYERS, width=32, heads=2, context=8, vocab=16)
UNIT = sum(part.nbytes for part in Gpt(POLICY.model_copy(update={"layers": 1})).blocks.parameters())
STAGING = 3 * 4 * UNIT
"""Two blocks of weight, moments and gradient, and that of a new Unit."""
BESIDE = 4 * UNIT
"""Moments as the optimizer makes them, and elements that are drawn or read."""


def gpt() -> Gpt:
    torch.manual_seed(0)
    return Gpt(POLICY)


def on_meta() -> Gpt:
    with torch.device("meta"):
        return gpt()


def built(make: Callable[[], nn.Module], folder: Path, start: Path | None = None) -> tuple[int, int, int]:
    """Bytes (of the model as it came, at most, when the engine stands)."""
    model = make()
    offload = {"optimizer": "disk", "parameters": "disk", "disk_path": str(folder), "buffers": 1}
    given = {"zero": {"stage": 3}, "offload": offload, "check_first_step": "off"} | (
        {"init_from": str(start)} if start else {}
    )
    # Memory of a block a thread does not grow with the model, which is smaller here.
    of_pages = patch("shardwise.engine.construction.site.DiskScratch", partial(DiskScratch, block_bytes=4096))
    with of_pages, Allocated() as found:
        for parameter in model.parameters():
            found.note(parameter.detach())
        own = found.now
        engine = shardwise.initialize(model, given)
        now = found.now
    weights = engine.state_dict()
    expected = gpt().state_dict() if start or own else weights
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    engine.close(whole=False)
    return own, found.most, now


def test_a_model_on_meta_is_drawn_unit_by_unit_into_its_tier(tmp_path: Path) -> None:
    _, most, _ = built(on_meta, tmp_path)
    assert most <= STAGING + BESIDE < LAYERS * UNIT


def test_a_model_that_comes_initialised_is_let_go_unit_by_unit(tmp_path: Path) -> None:
    own, most, now = built(gpt, tmp_path)
    assert own >= LAYERS * UNIT
    assert most <= own + STAGING + BESIDE - UNIT
    assert now <= STAGING, "its own memory is free when the engine stands"


def test_weights_are_read_tensor_by_tensor_into_their_tier(tmp_path: Path) -> None:
    save_file(gpt().state_dict(), tmp_path / "start.safetensors")
    _, most, _ = built(on_meta, tmp_path, tmp_path / "start.safetensors")
    assert most <= STAGING + BESIDE < LAYERS * UNIT


def test_an_export_takes_the_memory_of_a_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offload = {"optimizer": "disk", "parameters": "disk", "disk_path": str(tmp_path), "buffers": 1}
    engine = shardwise.initialize(gpt(), {"zero": {"stage": 3}, "offload": offload})
    before = sorted(tmp_path.iterdir())
    with monkeypatch.context() as patch, Allocated() as found:
        patch.setattr(StoredTensor, "mapped", lambda stored: torch.empty(0))
        engine.mapped_state_dict(tmp_path)
    assert found.most <= STAGING < LAYERS * UNIT
    whole, mapped = engine.state_dict(), engine.mapped_state_dict(tmp_path)
    assert list(whole) == list(mapped) and sorted(tmp_path.iterdir()) == before
    assert all(torch.equal(tensor, mapped[name]) for name, tensor in whole.items())
    half = engine.mapped_state_dict(tmp_path, trained_only=True, dtype=torch.bfloat16)
    assert all(torch.equal(tensor, whole[name].bfloat16()) for name, tensor in half.items())
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="the whole model takes 0.003 GB in .*: .*file"):
        engine.mapped_state_dict(tmp_path / "file")
    engine.close()


def test_whole_models_that_do_not_fit_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(8, 8)
    offload = {"optimizer": "disk", "parameters": "disk", "disk_path": str(tmp_path)}
    engine = shardwise.initialize(model, {"zero": {"stage": 3}, "offload": offload})
    monkeypatch.setattr(state, "_WORTH_ASKING_BYTES", 0)
    with engine.full_parameters():
        pass
    monkeypatch.setattr(state, "available_bytes", lambda device: 100)
    said = "whole parameters take .* on each of 1 ranks that share this memory, and 100"
    for call in (engine.full_parameters, engine.gathered):
        with pytest.raises(UsageError, match=said), call():
            pass
    with pytest.raises(UsageError, match=f"state_dict: {said}.*mapped_state_dict"):
        engine.state_dict()
    with engine.full_parameters("weight") as found:
        assert found["weight"].numel() == 64
    engine.close()
    assert "close: whole parameters take" in caplog.text
    with pytest.raises(UsageError):
        model.weight.sum()
