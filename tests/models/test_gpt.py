"""The GPT: what it computes, how it is built, what it says when it is used wrongly."""

import copy
import math

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from shardwise.base.errors import ConfigError, PlanError, UsageError
from shardwise.kernels.attention import plain_attention
from shardwise.kernels.initializers import Constant, Normal
from shardwise.models.gpt import Gpt, GptPolicy, RopeScaling, flops_per_token, parameter_count
from shardwise.models.initial import draw
from tests.models.shapes import BOTH, GPT2, LLAMA, NAMES, restless, tokens

both = pytest.mark.parametrize("policy", BOTH, ids=NAMES)


def changed(policy: GptPolicy, **keys: object) -> GptPolicy:
    return GptPolicy.model_validate(policy.model_dump() | keys)


@both
def test_the_loss_is_the_mean_over_targets(policy: GptPolicy) -> None:
    model, x = restless(policy), tokens()
    y = x.roll(-1, 1)
    y[0, :5] = -100
    expected = nn.functional.cross_entropy(model(x).view(-1, 50), y.view(-1))
    assert model(x, y).item() == pytest.approx(expected.item(), rel=1e-6)


@both
def test_no_token_sees_later_ones(policy: GptPolicy) -> None:
    model, x = restless(policy, torch.float64), tokens()
    other = x.clone()
    other[:, 7:] = (other[:, 7:] + 1) % 50
    first, second = model(x), model(other)
    assert torch.allclose(first[:, :7], second[:, :7], atol=1e-13)
    assert not torch.allclose(first[:, 7], second[:, 7])


@both
def test_the_order_of_earlier_tokens_matters(policy: GptPolicy) -> None:
    model, x = restless(policy, torch.float64), tokens()
    other = x.clone()
    other[:, [1, 3]] = x[:, [3, 1]]
    assert not torch.allclose(model(x)[:, -1], model(other)[:, -1], atol=1e-6)


@both
def test_gradients_with_the_plain_attention(policy: GptPolicy) -> None:
    x = tokens()
    model = restless(policy, torch.float64)
    plain = Gpt(policy, attention=plain_attention).double()
    plain.load_state_dict(model.state_dict())
    for m in (model, plain):
        m(x, x.roll(-1, 1)).backward()
    for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (a.grad - b.grad).norm() <= 1e-12 * b.grad.norm(), name


def test_the_model_calls_the_attention_it_is_given() -> None:
    shapes = []

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shapes.append([tuple(t.shape) for t in (q, k, v)])
        return plain_attention(q, k, v)

    Gpt(LLAMA, attention=attention)(tokens())
    assert shapes == [[(2, 4, 12, 8), (2, 2, 12, 8), (2, 2, 12, 8)]] * 2


@both
def test_on_meta_it_has_no_buffer_and_takes_any_data(policy: GptPolicy) -> None:
    """Each rank gives a meta model the elements it drew itself; the result is the model built in one piece."""
    with torch.device("meta"):
        model = Gpt(policy)
    assert all(p.is_meta for p in model.parameters())
    assert not list(model.buffers())
    assert "head.weight" in model.state_dict()
    for name, rule in model.initial_rules().items():
        shape = model.get_parameter(name).shape
        half = math.prod(shape) // 2
        cuts = [(0, half), (half, math.prod(shape))]
        pieces = [draw(rule, 5, name, start, stop, torch.float32) for start, stop in cuts]
        value = nn.Parameter(torch.cat(pieces).view(shape))
        names = (
            ("embed.weight", "head.weight") if name == "embed.weight" and model.policy.tied_head else (name,)
        )
        for alias in names:
            module, _, leaf = alias.rpartition(".")
            setattr(model.get_submodule(module), leaf, value)
    assert torch.equal(model(tokens()), Gpt(policy, seed=5)(tokens()))


@both
def test_start_weights(policy: GptPolicy) -> None:
    policy = changed(policy, width=96, head_size=None, hidden=None, vocab=300)
    model = Gpt(policy)
    rules = model.initial_rules()
    assert set(rules) == {name for name, _ in model.named_parameters()}
    assert rules["blocks.1.attention.out.weight"] == rules["blocks.0.mlp.down.weight"] == Normal(0.01)
    assert rules["embed.weight"] == Normal(0.02)
    for name, parameter in model.named_parameters():
        rule = rules[name]
        if isinstance(rule, Normal):
            assert parameter.std().item() == pytest.approx(rule.std, rel=0.05), name
        else:
            assert rule == Constant(float("norm.weight" in name)), name
            assert (parameter == rule.value).all()


def test_parameters_keep_their_names() -> None:
    assert [name for name, _ in Gpt(changed(LLAMA, layers=1)).named_parameters()] == [
        "embed.weight",
        "blocks.0.attention_norm.weight",
        "blocks.0.attention.qkv.weight",
        "blocks.0.attention.out.weight",
        "blocks.0.mlp_norm.weight",
        "blocks.0.mlp.gate_up.weight",
        "blocks.0.mlp.down.weight",
        "norm.weight",
        "head.weight",
    ]


@pytest.mark.parametrize("tied", [True, False])
@both
def test_ties_survive_a_move_off_the_meta_device_and_a_copy(policy: GptPolicy, tied: bool) -> None:
    with torch.device("meta"):
        model = Gpt(changed(policy, tied_head=tied))
    for m in (model.to_empty(device="cpu"), model.bfloat16(), copy.deepcopy(model)):
        assert (m.head.weight is m.embed.weight) == tied


def test_a_broken_tie_is_an_error() -> None:
    model = Gpt(GPT2)
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    with pytest.raises(PlanError, match="became two tensors"):
        model(tokens())


@both
def test_units_name_modules_and_leave_a_tied_embedding_to_the_root(policy: GptPolicy) -> None:
    assert Gpt(changed(policy, tied_head=True)).unit_patterns() == ["blocks.*"]
    assert Gpt(changed(policy, tied_head=False)).unit_patterns() == ["embed", "blocks.*", "head"]


@both
def test_bf16_is_close_to_fp32_and_has_an_fp32_loss(policy: GptPolicy) -> None:
    x = tokens()
    model = restless(policy)
    loss = model(x, x.roll(-1, 1))
    narrow = copy.deepcopy(model).bfloat16()
    narrow_loss = narrow(x, x.roll(-1, 1))
    assert narrow_loss.dtype == torch.float32
    assert narrow_loss.item() == pytest.approx(loss.item(), rel=2e-2)
    narrow_loss.backward()
    assert all(p.grad.isfinite().all() for p in narrow.parameters())


def test_norms_may_stay_in_fp32() -> None:
    x = tokens()
    model = restless(LLAMA).bfloat16()
    expected = model(x)
    for name, module in model.named_modules():
        if name.endswith("norm"):
            module.float()
    assert model(x).dtype == torch.bfloat16
    assert torch.allclose(model(x), expected, atol=0.1)


@both
def test_recomputed_blocks_give_the_same_gradients(policy: GptPolicy) -> None:
    x = tokens()
    model, again = restless(policy), restless(policy)
    for block in again.blocks:
        forward = block.forward
        block.forward = lambda *a, f=forward: checkpoint(f, *a, use_reentrant=False)
    for m in (model, again):
        m(x, x).backward()
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


# dynamo itself trips over warnings of torch's when they are errors.
@pytest.mark.filterwarnings("ignore")
@both
def test_blocks_compile_without_a_break(policy: GptPolicy) -> None:
    x = tokens()
    model, compiled = restless(policy), restless(policy)
    for block in compiled.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    for m in (model, compiled):
        m(x, x.roll(-1, 1)).backward()
    for (name, a), b in zip(model.named_parameters(), compiled.parameters(), strict=True):
        assert (a.grad - b.grad).norm() <= 1e-5 * a.grad.norm(), name


@both
def test_shapes_can_be_traced_on_meta(policy: GptPolicy) -> None:
    with torch.device("meta"):
        model = Gpt(policy)
    x = tokens().to("meta")
    assert model(x).shape == (2, 12, 50)
    model(x, x).backward()
    assert all(p.grad.shape == p.shape for p in model.parameters())


def test_dropout_only_in_training() -> None:
    model = restless(changed(GPT2, dropout=0.5))
    assert not torch.equal(model(tokens()), model(tokens()))
    model.eval()
    assert torch.equal(model(tokens()), restless(GPT2)(tokens()))


def test_too_many_tokens() -> None:
    with pytest.raises(UsageError, match="17 tokens but its context is 16"):
        Gpt(LLAMA)(tokens(length=17))


def test_left_out_keys_are_filled() -> None:
    policy = GptPolicy(width=384, heads=6).resolved(256)
    assert (policy.vocab, policy.kv_heads, policy.head_size, policy.hidden) == (256, 6, 64, 1024)
    assert policy.tied_head is False
    assert policy.resolved() == policy == policy.resolved(256)
    gpt2 = GptPolicy(family="gpt2", width=384, heads=6).resolved(256)
    assert (gpt2.hidden, gpt2.tied_head) == (1536, True)
    assert GptPolicy(vocab=300).resolved(256).vocab == 300


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"width": 100}, "width 100 does not divide by heads 6"),
        ({"kv_heads": 4}, "heads 6 does not divide by kv_heads 4"),
        ({"head_size": 33}, "a head has 33; make it even"),
        ({"family": "gpt2", "kv_heads": 2}, "kv_heads 2 is for family: llama"),
        ({"family": "gpt2", "rope_theta": 5e5}, "rope_theta and rope_scaling are for family: llama"),
        ({"layer": 3}, "unknown key 'layer'; did you mean 'layers'"),
        ({"rope_scaling": {"factor": 8, "low_freq_factor": 5}}, "low_freq_factor must be below"),
    ],
)
def test_wrong_policies(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        GptPolicy.model_validate(keys)


def test_the_vocabulary_must_be_known_and_large_enough() -> None:
    with pytest.raises(ConfigError, match="set model.vocab"):
        Gpt(GptPolicy())
    with pytest.raises(ConfigError, match="200 but the tokenizer makes 256"):
        GptPolicy(vocab=200).resolved(256)


@both
def test_flops_are_those_of_the_matrix_products(policy: GptPolicy) -> None:
    policy = changed(policy, width=96, head_size=None, hidden=None, vocab=512)
    x = tokens(length=16)
    model = Gpt(policy, attention=plain_attention)  # Computes the whole square, as the counter expects.
    with FlopCounterMode(display=False) as counter:
        model(x, x).backward()
    assert counter.get_total_flops() == x.numel() * flops_per_token(policy, causal=False)
    full, half = (flops_per_token(policy, causal) for causal in (False, True))
    assert full - half == 6 * policy.layers * 96 * policy.context


def test_parameter_count_of_a_published_model() -> None:
    gpt2 = GptPolicy(family="gpt2", layers=12, width=768, heads=12, context=1024, vocab=50257)
    assert parameter_count(gpt2) == 124_439_808


def test_long_contexts_turn_more_slowly() -> None:
    scaling = RopeScaling(factor=8, original_context=16)
    plain, stretched = restless(LLAMA), restless(changed(LLAMA, rope_scaling=scaling.model_dump()))
    assert not torch.allclose(plain(tokens()), stretched(tokens()), atol=1e-4)


@pytest.mark.gpu
@both
def test_an_accelerator_gives_the_same_loss_and_gradients(policy: GptPolicy) -> None:
    x = tokens()
    here = restless(policy)
    there = copy.deepcopy(here).to(torch.accelerator.current_accelerator())
    losses = [m(x.to(m.embed.weight.device), x.to(m.embed.weight.device)) for m in (here, there)]
    for loss in losses:
        loss.backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
    for a, b in zip(here.parameters(), there.parameters(), strict=True):
        assert (a.grad - b.grad.cpu()).norm() <= 1e-4 * a.grad.norm()
