"""Recomputation: the same gradients, and bytes and operations as the closed forms say."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from shardwise.base.errors import ConfigError, UsageError
from shardwise.comm import duals
from shardwise.comm.operators import ExchangeSite
from shardwise.comm.policy import CommPolicy
from shardwise.comm.step_clock import StepClock
from shardwise.comm.trace import Traffic
from shardwise.comm.world import World
from shardwise.kernels.rotary import RotaryAngles
from shardwise.models.cache import KeyValueCache
from shardwise.models.dropout import KeyedDropout, replace_dropout
from shardwise.models.gpt import Gpt, GptPolicy
from shardwise.passes.recompute import RecomputePolicy, apply_recompute, chosen, recomputed
from shardwise.passes.replay import BatchPosition, DrawReplay, ReplayContext
from shardwise.passes.second_run import SecondRuns
from shardwise.plan.mesh import Mesh
from tests.engine.nets import LLAMA, cache_name
from tests.passes.closed_forms import BlockShape, kept_elements, repeated_flops

SCOPES: list[dict[str, Any]] = [
    {"scope": "full"},
    {"scope": "selective"},
    {"scope": "selective", "select": "operations"},
    {"scope": "full", "blocks": 2},
    {"scope": "selective", "blocks": ["blocks.1"]},
]
TOKENS = torch.arange(32).view(2, 16) % 11


def gpt(family: str = "llama", dropout: float = 0.0, dtype: torch.dtype = torch.float64, **keys: Any) -> Gpt:
    shape = {"layers": 3, "width": 16, "heads": 4, "context": 1024, "vocab": 11, "hidden": 24} | keys
    return Gpt(GptPolicy(family=family, dropout=dropout, **shape)).to(dtype)


def wrap(model: Gpt, replay: DrawReplay, keys: dict[str, Any]) -> list[str]:
    blocks = [(f"blocks.{i}", block) for i, block in enumerate(model.blocks)]
    return apply_recompute(blocks, RecomputePolicy(**keys), replay)


def gradients(model: nn.Module, replay: DrawReplay) -> list[Tensor]:
    """Two microbatches, both forwards first, as a pipeline has them."""
    losses = []
    for first in (0, 2):
        with replay.at(BatchPosition(3, first_sample=first)):
            losses.append(model(TOKENS, TOKENS))
    with replay.at(BatchPosition(99)):
        for loss in losses:
            loss.backward()
    return [parameter.grad for parameter in model.parameters()]


# The same numbers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("keys", SCOPES, ids=str)
def test_gradients_are_the_same_bits_with_dropout(keys: dict[str, Any], family: str) -> None:
    results = []
    for wanted in ({}, keys):
        model, replay = gpt(family, dropout=0.3), DrawReplay()
        assert replace_dropout(model, 0, replay) == 7
        wrap(model, replay, wanted)
        results.append(gradients(model, replay))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_without_the_replay_they_would_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite's own check: the place of the backward pass is another one."""
    monkeypatch.setattr(SecondRuns, "next", lambda self: None)  # which refuses it
    results = []
    for broken in (False, True):
        model, replay = gpt(dropout=0.3), DrawReplay()
        replace_dropout(model, 0, replay)
        wrap(model, replay, {"scope": "full"})
        if broken:
            monkeypatch.setattr(ReplayContext, "__enter__", lambda self: None)
            monkeypatch.setattr(ReplayContext, "__exit__", lambda self, *exception: None)
        results.append(gradients(model, replay))
    assert not all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("keys", SCOPES[:3], ids=str)
def test_torchs_own_random_state_replays(keys: dict[str, Any]) -> None:
    results = []
    for wanted in ({}, keys):
        model, replay = gpt(dropout=0.3), DrawReplay()
        wrap(model, replay, wanted)
        torch.manual_seed(5)
        results.append(gradients(model, replay))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_states_are_touched_again_only_where_a_piece_drew(monkeypatch: pytest.MonkeyPatch) -> None:
    set_to: list[Tensor] = []
    put = torch.set_rng_state
    monkeypatch.setattr(torch, "set_rng_state", lambda state: (set_to.append(state), put(state)))
    for drops, expected in ((False, 0), (True, 2)):
        set_to.clear()
        x = torch.ones(4, requires_grad=True)
        piece = recomputed(
            lambda x, p=drops: nn.functional.dropout(x.exp(), 0.5) if p else x.exp().sin(), DrawReplay()
        )
        out = piece(x)
        out.sum().backward()
        assert len(set_to) == expected, "to the first run's, and back"
        if drops:
            assert torch.equal((x.grad != 0), (out != 0))


def test_a_layer_used_twice_drops_other_features_and_replays_them() -> None:
    class Twice(nn.Module):
        def __init__(self, replay: DrawReplay) -> None:
            super().__init__()
            self.drop = KeyedDropout(0.5, 0, "drop", replay)
            self.seen: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            a, b = self.drop(x), self.drop(x)
            self.seen += [(a != 0).detach(), (b != 0).detach()]
            return (a.square() * b.square()).exp()

    replay = DrawReplay()
    block = Twice(replay)
    apply_recompute([("block", block)], RecomputePolicy(scope="full"), replay)
    x = torch.ones(2, 8, 8, requires_grad=True)
    with replay.at(BatchPosition(0)):
        block(block(x)).sum().backward()
    first, second, third, fourth, *again = block.seen
    assert not torch.equal(first, second)
    assert not torch.equal(first, third)
    # Backward runs the second use again first; the last product is not needed a second time.
    expected = [third, fourth, first, second]
    assert len(again) == 4
    assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))


def test_without_gradients_a_cache_works_and_with_them_it_is_refused() -> None:
    plain, model = gpt().eval(), gpt().eval()
    wrap(model, DrawReplay(), {"scope": "full"})
    results = []
    for net in (plain, model):
        cache = KeyValueCache(32)
        with torch.no_grad():
            results.append([net(TOKENS[:, :4], cache=cache), net(TOKENS[:, 4:5], cache=cache)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    with pytest.raises(UsageError, match=r"block blocks.0 was given a cache.*no_grad"):
        model(TOKENS, cache=KeyValueCache(32))


def test_a_second_backward_pass_runs_it_again() -> None:
    model, replay = gpt(dropout=0.3), DrawReplay()
    replace_dropout(model, 0, replay)
    wrap(model, replay, {"scope": "full"})
    with replay.at(BatchPosition(1)):
        loss = model(TOKENS, TOKENS)
    parameters = list(model.parameters())
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, torch.autograd.grad(loss, parameters), strict=True))


# Choices that are made once ------------------------------------------------------------------------------------------


class Choosing(nn.Module):
    """Each row of x [N, D] goes through one of E matrices. What the choice hangs on moves while passes are under way,
    as the last bit of a sum may."""

    def __init__(self, replay: DrawReplay, experts: int = 3, width: int = 4) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.router = nn.Parameter(torch.randn(experts, width, generator=generator, dtype=torch.float64))
        self.experts = nn.Parameter(
            torch.randn(experts, width, width, generator=generator, dtype=torch.float64)
        )
        self.replay = replay
        self.moved = 0
        self.chosen: list[Tensor] = []

    def choose(self, scores: Tensor) -> Tensor:
        index = scores.roll(self.moved, -1).argmax(-1)
        self.chosen.append(index)
        return index

    def forward(self, x: Tensor) -> Tensor:
        scores = (x @ self.router.T).softmax(-1)
        index = self.replay.keep("choice", lambda: self.choose(scores))
        out = torch.einsum("nd,nde->ne", x, self.experts[index]).tanh()
        return x + out * scores.gather(1, index[:, None])


def routed(
    wrap: Callable[[Choosing, DrawReplay], None], twice: bool = True
) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of two microbatches, both forwards first, and the choices. ``twice``: with a second backward pass."""
    replay = DrawReplay()
    net, generator = Choosing(replay), torch.Generator().manual_seed(1)
    wrap(net, replay)
    losses = []
    for first in range(2):
        with replay.at(BatchPosition(0, first)):
            losses.append(net(torch.randn(5, 4, dtype=torch.float64, generator=generator)).square().sum())
    net.moved = 1
    parameters = [net.router, net.experts]
    found = [each for loss in losses for each in torch.autograd.grad(loss, parameters, retain_graph=twice)]
    if twice:
        again = [each for loss in losses for each in torch.autograd.grad(loss, parameters)]
        assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    return found, net.chosen


def nested(net: Choosing, replay: DrawReplay) -> None:
    net.forward = recomputed(recomputed(net.forward, replay), replay)  # type: ignore[method-assign]


WRAPS: dict[str, Callable[[Choosing, DrawReplay], Any]] = {
    "full": lambda net, replay: apply_recompute([("b", net)], RecomputePolicy(scope="full"), replay),
    "operations": lambda net, replay: apply_recompute(
        [("b", net)], RecomputePolicy(scope="selective"), replay
    ),
    "nested": nested,
}


@pytest.mark.parametrize("name", WRAPS)
def test_a_choice_is_made_once(name: str) -> None:
    """A block that chooses anew sends its rows through other experts than those that the loss came from."""
    twice = name != "operations"  # torch's own refuses a second pass there
    (expected, chosen_once), (found, chosen) = routed(lambda *_: None), routed(WRAPS[name], twice)
    assert len(chosen_once) == len(chosen) == 2
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_a_choice_that_is_made_again_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite's own check."""
    monkeypatch.setattr(SecondRuns, "next", lambda self: None)  # which refuses it
    monkeypatch.setattr(DrawReplay, "keep", lambda self, key, make: make())
    expected, found = routed(lambda *_: None)[0], routed(WRAPS["nested"])[0]
    assert not all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_what_is_kept_goes_with_the_graph() -> None:
    replay, kept = DrawReplay(), []

    def make() -> Tensor:
        made = torch.arange(3)
        kept.append(weakref.ref(made))
        return made

    run = recomputed(lambda x: x.tanh()[replay.keep("choice", make)], replay)
    loss = run(torch.ones(3, requires_grad=True)).sum()
    loss.backward(retain_graph=True)
    assert len(kept) == 1 and kept[0]() is not None
    del loss
    gc.collect()
    assert kept[0]() is None


# Bytes and operations ------------------------------------------------------------------------------------------------

SHAPES = {
    "llama": ("llama", {"kv_heads": 2}),
    "gpt2": ("gpt2", {}),
    "wide head": ("llama", {"head_size": 6}),
}


def shape_of(model: Gpt, tokens: Tensor) -> BlockShape:
    p = model.policy
    counts = (*tokens.shape, p.width, p.heads, p.kv_heads, p.head_size, p.hidden)
    return BlockShape(*counts, is_gated=p.family == "llama")  # type: ignore[arg-type]


def block_run(model: Gpt, tokens: Tensor) -> tuple[Callable[[], Tensor], list[Tensor]]:
    """A call of the first block on random input, and what it reads that is no activation: weights and angles."""
    block = model.blocks[0]
    x = torch.randn(*tokens.shape, model.policy.width, dtype=torch.float64, requires_grad=True)
    at = None
    if model.positions is None:
        at = RotaryAngles(*(angle.double() for angle in model._angles(torch.arange(tokens.shape[1]))))
    return lambda: block(x.clone(), at), [*block.parameters(), *(at or ())]


def kept_bytes(run: Callable[[], Tensor], shared: list[Tensor]) -> int:
    """Bytes of the storages that autograd keeps, each once, but for what all blocks share."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        alive = run()
    del alive
    for tensor in shared:
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(storages.values())


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("scope", ["none", "full", "selective"])
@pytest.mark.parametrize("sequence", [48, 300, 600])
def test_kept_bytes_equal_the_closed_form(name: str, scope: Any, sequence: int) -> None:
    family, keys = SHAPES[name]
    model, tokens = gpt(family, **keys), torch.zeros(2, sequence, dtype=torch.int64)
    wrap(model, DrawReplay(), {"scope": scope})
    assert kept_bytes(*block_run(model, tokens)) == 8 * kept_elements(shape_of(model, tokens), scope)


def live_bytes(run: Callable[[], Tensor]) -> int:
    """Net bytes that a forward pass leaves allocated, whoever holds them."""
    run()
    gc.collect()
    with torch.profiler.profile(
        profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]
    ) as profile:
        out = run()
    total = sum(event.self_cpu_memory_usage for event in profile.key_averages())
    del out
    return total


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("scope", ["full", "selective"])
@pytest.mark.parametrize("sequence", [48, 600])
def test_repeated_flops_equal_the_closed_form(name: str, scope: Any, sequence: int) -> None:
    family, keys = SHAPES[name]
    tokens = torch.zeros(2, sequence, dtype=torch.int64)
    counted = []
    for wanted in ("none", scope):
        model = gpt(family, **keys)
        wrap(model, DrawReplay(), {"scope": wanted})
        run, _ = block_run(model, tokens)
        with FlopCounterMode(display=False) as counter:
            run().sum().backward()
        counted.append(counter.get_total_flops())
    assert counted[1] - counted[0] == repeated_flops(shape_of(model, tokens), scope)


class TorchBlock(nn.Module):
    """A block of a user's own, with torch's fused attention or with plain products."""

    def __init__(self, fused: bool, width: int = 32) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, 4, d // 4).permute(2, 0, 3, 1, 4)
        if self.fused:
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mixed = (q @ k.mT).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, d))
        result: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return result


@pytest.mark.parametrize("fused", [True, False])
def test_operations_repeats_no_product_with_weights(fused: bool) -> None:
    results, counted, live = [], [], []
    for keys in ({}, {"scope": "selective"}, {"scope": "full"}):
        torch.manual_seed(0)
        block = TorchBlock(fused)
        apply_recompute([("block", block)], RecomputePolicy(**keys), DrawReplay())
        x = torch.randn(2, 96, 32, requires_grad=True)
        live.append(live_bytes(lambda: block(x)))  # noqa: B023
        with FlopCounterMode(display=False) as counter:
            block(x).sum().backward()
        counted.append(counter.get_total_flops())
        results.append([x.grad, *(parameter.grad for parameter in block.parameters())])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    attention = 2 * 2 * (2 * 4 * 96 * 96 * 8)
    assert counted[1] - counted[0] == (0 if fused else attention)
    assert counted[2] > counted[1]
    assert live[0] > live[1] > live[2]


# Which blocks --------------------------------------------------------------------------------------------------------

NAMES = [f"blocks.{i}" for i in range(6)]


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ("all", [0, 1, 2, 3, 4, 5]),
        (1, [0, 1, 2, 3, 4, 5]),
        (1.0, [0, 1, 2, 3, 4, 5]),
        (4, [0, 4]),
        (0.5, [0, 2, 4]),
        (0.01, [0]),
        (["blocks.4", "*.1"], [1, 4]),
    ],
    ids=str,
)
def test_which_blocks(blocks: Any, expected: list[int]) -> None:
    assert chosen(NAMES, RecomputePolicy(scope="full", blocks=blocks)) == [f"blocks.{i}" for i in expected]


def test_a_word_is_a_scope() -> None:
    assert RecomputePolicy.model_validate("full") == RecomputePolicy(scope="full")
    assert chosen(NAMES, RecomputePolicy()) == []


@pytest.mark.parametrize("blocks", [0, -1, 0.0, 1.5, "some"])
def test_which_blocks_cannot_be(blocks: Any) -> None:
    with pytest.raises(ValueError):
        RecomputePolicy(scope="full", blocks=blocks)


def test_errors() -> None:
    with pytest.raises(
        ConfigError, match=r"'layers.\*' matches no block; the model's are blocks.0, blocks.1"
    ):
        chosen(NAMES, RecomputePolicy(scope="full", blocks=["layers.*"]))
    with pytest.raises(ConfigError, match="blocks are not found"):
        chosen([], RecomputePolicy(scope="full"))
    with pytest.raises(ValueError, match="select: attention belongs to scope selective, not to full"):
        RecomputePolicy(scope="full", select="attention")
    with pytest.raises(ConfigError, match=r"no module in block b holds.*select: operations"):
        policy = RecomputePolicy(scope="selective", select="attention")
        apply_recompute([("b", TorchBlock(True))], policy, DrawReplay())
    itself = TorchBlock(True)
    itself.gradient_checkpointing = True  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="already recomputes by itself"):
        apply_recompute([("b", itself)], RecomputePolicy(scope="full"), DrawReplay())


# With other techniques -----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:.*should not be instantiated")
@pytest.mark.parametrize(
    ("keys", "compiles_first"), [(SCOPES[0], True), (SCOPES[0], False), (SCOPES[1], True)], ids=str
)
def test_with_compiled_blocks(keys: dict[str, Any], compiles_first: bool) -> None:
    """The other order once gave wrong gradients: the compiler gave up in the checkpoint and dropped the replay."""
    torch._dynamo.reset()
    results = []
    for compiles in (False, True):
        model, replay = gpt(dropout=0.3, layers=1), DrawReplay()
        replace_dropout(model, 0, replay)
        if not compiles_first:
            wrap(model, replay, keys)
        if compiles:
            for block in model.blocks:
                block.forward = torch.compile(block.forward, backend="aot_eager")
        if compiles_first:
            wrap(model, replay, keys)
        results.append(gradients(model, replay))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def trained(world: World, keys: dict[str, Any], stage: int) -> list[Tensor]:
    import shardwise

    model = gpt()
    replay = DrawReplay()
    wrap(model, replay, keys)
    config = {"zero": {"stage": stage}, "precision": "fp64", "optimizer": {"type": "sgd", "lr": 0.1}}
    engine = shardwise.initialize(model, config, world=world)
    for step in range(3):
        rows = TOKENS[world.rank : world.rank + 1].roll(step, 1)
        engine.train_step([(rows, rows)])
    assert not engine.trace.divergences
    return list(engine.state_dict().values())


@pytest.mark.parametrize("stage", [0, 3])
def test_with_zero_on_two_ranks(ranks: Any, stage: int) -> None:
    plain = ranks(2).run(trained, {}, stage)
    for keys in SCOPES[:3]:
        for a, b in zip(plain, ranks(2).run(trained, keys, stage), strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


GPT2 = dict(n_embd=16, n_layer=2, n_head=4, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


def hugging_face(kind: str, keys: dict[str, Any]) -> Any:
    """Return a model of transformers whose blocks recompute; GPT-2 passes its cache by position, LLaMA by name."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=11, **LLAMA))
        blocks = model.model.layers
    else:
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=11, **GPT2))
        blocks = model.transformer.h
    named = [(f"blocks.{i}", block) for i, block in enumerate(blocks)]
    apply_recompute(named, RecomputePolicy(**keys), DrawReplay())
    return model.train()


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_hugging_face_caches_are_left_out(kind: str) -> None:
    """A training pass of transformers fills a cache that nobody reads; a second run would fill it twice."""
    results = []
    for keys in ({}, {"scope": "full"}, {"scope": "selective"}, {"scope": "full", "blocks": ["blocks.1"]}):
        model = hugging_face(kind, keys)
        model(input_ids=TOKENS, labels=TOKENS, use_cache=True).loss.backward()
        results.append([parameter.grad for parameter in model.parameters()])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_hugging_face_cache_with_past_tokens_is_refused(kind: str) -> None:
    """Without the cache the block would not attend to the tokens before, silently (a tuned prefix, for example)."""
    model = hugging_face(kind, {"scope": "full"})
    name = cache_name(model)
    with torch.no_grad():
        past = model(input_ids=TOKENS[:, :3], use_cache=True)[name]
    assert past.get_seq_length() == 3
    with pytest.raises(
        UsageError, match="block blocks.0 was given a cache that holds keys and values of past"
    ):
        model(input_ids=TOKENS[:, 3:], labels=TOKENS[:, 3:], use_cache=True, **{name: past})


class Sharing(nn.Module):
    """A block that attends to the keys of an earlier block, which older releases keep in the cache (Gemma 3n)."""

    def __init__(self) -> None:
        super().__init__()
        self.is_kv_shared_layer, self.layer_idx = True, 1
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor, cache: Any = None, **shared: Any) -> Tensor:
        return x * self.weight


def test_keys_that_blocks_share_through_a_cache_are_refused() -> None:
    transformers = pytest.importorskip("transformers")
    block = Sharing()
    apply_recompute([("1", block)], RecomputePolicy(scope="full"), DrawReplay())
    with pytest.raises(
        UsageError, match="block 1 takes the keys and values of an earlier block from the cache"
    ):
        block(torch.ones(2), cache=transformers.DynamicCache())
    block(torch.ones(2), cache=transformers.DynamicCache(), shared_kv_states={}).sum().backward()
    assert block.weight.grad is not None


class Exchanging(nn.Module):
    """A block whose forward and backward passes each sum over the ranks."""

    def __init__(self, group: Any, index: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8, dtype=torch.float64), nn.Linear(8, 8, dtype=torch.float64)
        self.site = ExchangeSite(group, f"block {index}")

    def forward(self, x: Tensor) -> Tensor:
        inner = self.up(duals.copy(x, self.site)).tanh()
        return x + duals.reduce(self.down(inner), self.site).tanh()


def exchanged(world: World, keys: dict[str, Any]) -> tuple[list[Tensor], int]:
    traffic = Traffic()
    group = world.group(Mesh(tp=world.size), "tp", CommPolicy(), StepClock(60.0, 0.0), traffic)
    torch.manual_seed(world.rank)
    blocks = nn.Sequential(*(Exchanging(group, i) for i in range(3)))
    named = [(str(i), block) for i, block in enumerate(blocks)]
    apply_recompute(named, RecomputePolicy(**keys), DrawReplay())
    x = torch.ones(2, 4, 8, dtype=torch.float64, requires_grad=True)
    blocks(x).sum().backward()
    return [x.grad, *(parameter.grad for parameter in blocks.parameters())], traffic.total(
        "activations"
    ).calls


def test_collectives_inside_run_again(ranks: Any) -> None:
    plain = ranks(2).run(exchanged, {})
    for keys in ({"scope": "full"}, {"scope": "selective", "select": "operations"}):
        for (a, sent), (b, sent_again) in zip(plain, ranks(2).run(exchanged, keys), strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
            assert sent == 6
            assert sent_again == 6 + 3


# Buffers that a block changes ----------------------------------------------------------------------------------------


class Counting(nn.Module):
    """A factor that falls with each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("passes", torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
        y: Tensor = torch.tanh(self.linear(x)) / float(self.passes)
        return y


class Averaging(nn.Module):
    """Centred by a moving average, which is replaced and not changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return torch.tanh(y - self.mean)


class Codebook(nn.Module):
    """The nearest code, which then moves; written by way of ``.data``, as vector quantisation often is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        codes = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        self.register_buffer("codes", codes)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        chosen = torch.cdist(y.detach(), self.codes).argmin(1)
        quantised = self.codes[chosen]
        self.codes.data[chosen] = 0.5 * quantised + 0.5 * y.detach()
        return x + (y - quantised).square()


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + torch.tanh(self.linear(x))
        return y


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.tanh(self.norm(self.linear(x)))
        return y


def through_blocks(kind: type[nn.Module], keys: dict[str, Any] | None, twice: bool) -> list[Tensor]:
    """Gradients and buffers after three pairs of passes, each pair walked back as a pipeline does, or ``twice``."""
    torch.manual_seed(3)
    blocks = nn.Sequential(*(kind() for _ in range(3))).to(torch.float64)
    if keys is not None:
        apply_recompute(
            [(str(i), block) for i, block in enumerate(blocks)], RecomputePolicy(**keys), DrawReplay()
        )
    generator = torch.Generator().manual_seed(4)
    for _ in range(3):
        xs = torch.randn(2, 6, 4, generator=generator, dtype=torch.float64)
        losses = [blocks(x).square().mean() for x in xs]
        for loss in losses * (1 + twice):
            loss.backward(retain_graph=twice)
    return [*(p.grad for p in blocks.parameters()), *blocks.buffers()]


@pytest.mark.parametrize("keys", [{"scope": "full"}, {"scope": "selective"}], ids=str)
@pytest.mark.parametrize("kind", [Counting, Averaging, Codebook, Spectral, Normed])
def test_a_second_run_sees_the_buffers_of_the_first(kind: type[nn.Module], keys: dict[str, Any]) -> None:
    """Only batch norms were spared: the second run counted, averaged and moved once more, and its gradients were off
    by 20 % and not a word."""
    twice = keys["scope"] == "full"  # torch's selective checkpoint is walked once
    for got, wanted in zip(through_blocks(kind, keys, twice), through_blocks(kind, None, twice), strict=True):
        assert torch.equal(got, wanted)


class Late(nn.Module):
    """A large buffer that begins to change in the second pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.zeros(20_000))
        self.moves = False

    def forward(self, x: Tensor) -> Tensor:
        if self.moves:
            self.table += 1
        y: Tensor = self.linear(x) * (1 + self.table[0])
        return y


def test_a_large_buffer_that_changes_late_is_refused() -> None:
    block = Late()
    apply_recompute([("blocks.7", block)], RecomputePolicy(scope="full"), DrawReplay())
    block(torch.ones(2, 4)).sum().backward()
    block.moves = True
    with pytest.raises(UsageError, match=r"block blocks\.7 changed its buffer 'table' \(80000 bytes\)"):
        block(torch.ones(2, 4))
