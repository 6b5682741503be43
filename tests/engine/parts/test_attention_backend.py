"""The key ``attention.backend``: which kernels torch chooses from while an engine is open."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise
from shardwise.base.errors import CheckpointError, ConfigError
from shardwise.comm.world import World, join
from shardwise.engine.parts import attention_backend
from shardwise.engine.parts.attention_backend import AttentionHold, DeviceKernels, chosen_kernels
from shardwise.models import Gpt, GptPolicy

H100 = DeviceKernels("cuda", (9, 0), has_flash=True, cudnn_version=92000)
A100 = H100._replace(capability=(8, 0))
V100 = DeviceKernels("cuda", (7, 0), cudnn_version=92000)
MI300 = DeviceKernels("cuda", has_flash=True)
CPU = DeviceKernels("cpu", has_flash=True)
XPU = DeviceKernels("xpu")


def choice() -> tuple[list[SDPBackend], list[int]]:
    """Return the kernels that torch chooses from, and its order of all kernels."""
    return attention._cur_sdpa_kernel_backends(with_priority=True), torch._C._get_sdp_priority_order()


@pytest.fixture(autouse=True)
def found() -> Iterator[Any]:
    """Yield torch's choice, and check that a test leaves it as it was."""
    before = choice()
    yield before
    assert choice() == before


@pytest.fixture
def world() -> World:
    """Return the World of one process."""
    return join(quiet=True)


def test_auto_puts_cudnn_first_where_it_is_written_for_the_device() -> None:
    assert chosen_kernels("auto", H100, False) == ("cudnn", "flash", "efficient", "math")
    assert chosen_kernels("auto", H100._replace(capability=(10, 0)), False)[0] == "cudnn"
    consumer, old = H100._replace(capability=(12, 0)), H100._replace(cudnn_version=91000)
    for device in (A100, V100, MI300, CPU, XPU, consumer, old, H100._replace(cudnn_version=0)):
        assert chosen_kernels("auto", device, False) == (), "torch's choice"
    assert chosen_kernels("auto", H100, True) == (), "torch takes flash, which has a fixed order then"
    assert chosen_kernels("torch", H100, False) == ()


def test_names_are_taken_in_their_order() -> None:
    assert chosen_kernels("flash", A100, True) == ("flash",)
    assert chosen_kernels(["cudnn", "math"], A100, False) == ("cudnn", "math")
    assert chosen_kernels("flash3", H100._replace(has_flash3=True), True) == ("flash3",)


@pytest.mark.parametrize(
    ("name", "device", "says"),
    [
        ("cudnn", CPU, r"cudnn, but this device \(cpu\).*it has flash, math"),
        ("efficient", CPU, "it has flash, math"),
        ("cudnn", V100, r"\(cuda, compute capability 7.0\).*it has efficient, math"),
        ("flash", V100, "it has efficient, math"),
        ("cudnn", MI300, r"\(cuda\).*it has flash, efficient, math"),
        ("flash", XPU, "it has math. Choose"),
        (
            "flash3",
            H100,
            "the package flash_attn_interface is not installed; it has flash, cudnn, efficient, math",
        ),
        ("flash3", A100._replace(has_flash3=True), r"8.0\) does not have that kernel; it has"),
        (["flash", "cudnn"], CPU, "attention.backend: cudnn"),
    ],
)
def test_what_a_device_does_not_have_is_refused_by_name(name: Any, device: DeviceKernels, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        chosen_kernels(name, device, False)


def test_the_device_of_this_test_is_described() -> None:
    assert DeviceKernels.of(torch.device("cpu")) == CPU
    assert DeviceKernels.of(torch.device("meta")) == DeviceKernels("meta")


class Operations(TorchDispatchMode):
    """Records the names of torch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    """A layer that calls torch's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.linear(x)[:, None]
        return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)[:, 0]


class Attends(nn.Module):
    """A model of two blocks; its output is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.blocks(x).square().mean())


def train(world: World, model: nn.Module, batch: Any, **config: Any) -> tuple[float, list[str]]:
    """Return the loss of one step, and the attention operations of torch that ran."""
    torch.manual_seed(0)
    engine = shardwise.initialize(model, config, world=world)
    with Operations() as ran:
        loss = engine.train_step([batch]).loss
    engine.close()
    return loss, ran.names


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_foreign_model_runs_the_named_kernel_in_both_passes(world: World, recompute: str) -> None:
    batch, losses = torch.randn(2, 5, 4), []
    torch.manual_seed(0)
    weights = Attends().state_dict()
    for backend, expected in (
        ("auto", "flash"),
        ("flash", "flash"),
        ("math", ""),
        (["math", "flash"], "flash"),
    ):
        model = Attends()
        model.load_state_dict(weights)
        loss, names = train(world, model, batch, attention=backend, recompute=recompute)
        losses.append(loss)
        forward = [name for name in names if name.endswith("flash_attention_for_cpu")]
        runs = 2 * (1 + (recompute == "full"))
        assert len(forward) == (runs if expected else 0), (backend, names)
    assert losses == pytest.approx([losses[0]] * 4)


def test_our_models_leave_their_own_blocks_for_a_named_kernel(world: World) -> None:
    batch, losses = torch.arange(16).view(2, 8), []
    for backend in ("auto", "flash", "math"):
        torch.manual_seed(0)
        model = Gpt(GptPolicy(layers=1, width=16, heads=2, hidden=32, context=8, vocab=31))
        loss, names = train(
            world, model, (batch, batch), attention={"backend": backend}, check_first_step="off"
        )
        losses.append(loss)
        assert any("flash_attention_for_cpu" in name for name in names) == (backend == "flash")
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute", "ignore:.*should not be instantiated"
)  # dynamo's own
def test_compiled_code_of_another_choice_is_not_run(world: World) -> None:
    """A graph contains the kernel of the choice under which it was traced, and no guard on the choice."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    batch, losses = torch.arange(16).view(2, 8), []
    words = {"compile": {"scope": "blocks", "backend": "aot_eager"}, "check_first_step": "off"}
    for backend in ("auto", "flash", "auto"):
        torch.manual_seed(0)
        model = Gpt(GptPolicy(layers=1, width=16, heads=2, hidden=32, context=8, vocab=31))
        engine = shardwise.initialize(model, {**words, "attention": {"backend": backend}}, world=world)
        with profile(activities=[ProfilerActivity.CPU]) as ran:  # a mode like Operations ends compilation
            losses.append(engine.train_step([(batch, batch)]).loss)
        assert not engine.graph_breaks
        engine.close()
        names = [event.name for event in ran.events()]
        assert any("flash_attention_for_cpu" in name for name in names) == (backend == "flash"), backend
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 3
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)
    torch._dynamo.reset()


def test_the_choice_holds_until_close(world: World, found: Any) -> None:
    seen: list[Any] = []

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        seen.append(choice()[0])
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return torch.as_tensor(model(batch).square().mean())

    engine = shardwise.initialize(nn.Linear(4, 4), {"attention": "math"}, loss=loss, world=world)
    engine.train_step([torch.ones(2, 4)])
    assert seen == [[SDPBackend.MATH]] and choice()[0] == [SDPBackend.MATH]
    other = shardwise.initialize(nn.Linear(4, 4), {"attention": ["math"]}, world=world)
    engine.close()
    assert choice()[0] == [SDPBackend.MATH], "another engine holds it"
    other.close()
    other.close()
    assert choice() == found


def test_open_engines_must_agree(world: World, found: Any) -> None:
    engine = shardwise.initialize(nn.Linear(4, 4), {"attention": "math"}, world=world)
    with pytest.raises(ConfigError, match="attention.backend: flash, but another open engine .* has math"):
        shardwise.initialize(nn.Linear(4, 4), {"attention": "flash"}, world=world)
    engine.close()
    assert choice() == found


def test_refused_and_dropped_engines_restore_the_choice(world: World, found: Any) -> None:
    with pytest.raises(CheckpointError, match="init_from"):
        shardwise.initialize(nn.Linear(4, 4), {"attention": "math", "init_from": "/nowhere"}, world=world)
    assert choice() == found
    engine = shardwise.initialize(nn.Linear(4, 4), {"attention": "math"}, world=world)
    del engine
    gc.collect()
    shardwise.initialize(nn.Linear(4, 4), {}, world=world).close()


def test_flash3_is_activated_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    active: list[str] = []
    monkeypatch.setattr(attention, "activate_flash_attention_impl", active.append)
    monkeypatch.setattr(attention, "restore_flash_attention_impl", lambda: active.append("none"))
    for before, after in ((None, ["FA3", "none"]), ("FA4", ["FA3", "FA4"]), ("FA3", [])):
        active.clear()
        monkeypatch.setattr(attention, "current_flash_attention_impl", lambda before=before: before)
        hold = AttentionHold(("flash3", "math"))
        assert choice()[0] == [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
        hold.end()
        assert active == after

    def fails(name: str) -> None:
        raise RuntimeError("no kernels")

    monkeypatch.setattr(attention, "current_flash_attention_impl", lambda: None)
    monkeypatch.setattr(attention, "activate_flash_attention_impl", fails)
    with pytest.raises(RuntimeError, match="no kernels"):
        AttentionHold(("flash3",))
    assert not attention_backend._CHOICE._holders


def test_a_call_that_no_named_kernel_serves_names_the_key(world: World) -> None:
    class Masked(Block):
        def forward(self, x: Tensor) -> Tensor:
            heads = self.linear(x)[:, None]
            mask = heads.mean() * torch.ones(5, 5)  # a mask with a gradient
            return F.scaled_dot_product_attention(heads, heads, heads, mask).mean()

    engine = shardwise.initialize(Masked(), {"attention": "flash"}, world=world)
    with (
        pytest.raises(RuntimeError, match="No available kernel") as caught,
        pytest.warns(UserWarning, match="Flash"),
    ):
        engine.train_step([torch.ones(2, 5, 4)])
    assert any("attention.backend leaves torch only" in note for note in caught.value.__notes__)
    engine.close()


def test_cudnn_and_deterministic_are_refused_together(world: World) -> None:
    for backend in ("cudnn", ["flash", "cudnn"]):
        with pytest.raises(ConfigError, match="cudnn has no fixed order"):
            shardwise.initialize(nn.Linear(4, 4), {"attention": backend, "deterministic": True}, world=world)
