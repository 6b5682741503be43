"""Keyed dropout: the reference's mask, and the same mask however batch, sequence or features are cut."""

import math

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.kernels import dropout, philox
from shardwise.kernels.dropout import EqualPart, MaskKey, keyed_dropout, plain_keyed_dropout

KEY = philox.key_of(3, "dropout:blocks.0.mlp.dropout")
DRAW = MaskKey(KEY, step=7, first_sample=4)


def ones(*shape: int) -> Tensor:
    return torch.ones(*shape, dtype=torch.float64)


@pytest.mark.parametrize("cut", [None, EqualPart(-1, 3, 1)], ids=str)
@pytest.mark.parametrize("shape", [(3, 1), (2, 5), (4, 6), (2, 3, 7), (2, 2, 3, 3)], ids=str)
def test_the_mask_is_the_references(shape: tuple[int, ...], cut: EqualPart | None) -> None:
    x = torch.randn(shape, dtype=torch.float64)
    for draw in (DRAW, DRAW._replace(call=2), DRAW._replace(samples=1)):
        assert torch.allclose(
            keyed_dropout(x, 0.4, draw, cut), plain_keyed_dropout(x, 0.4, draw, cut), rtol=1e-14
        )


def test_cuts_of_the_batch() -> None:
    whole = keyed_dropout(ones(6, 5, 8), 0.5, DRAW)
    for first, stop in [(0, 1), (1, 3), (3, 6)]:
        part = keyed_dropout(ones(stop - first, 5, 8), 0.5, DRAW._replace(first_sample=4 + first))
        assert torch.equal(part, whole[first:stop])


@pytest.mark.parametrize("dim", [1, 2, -1])
@pytest.mark.parametrize("parts", [2, 3])
def test_cuts_of_sequence_heads_and_features(dim: int, parts: int) -> None:
    x = ones(2, 6, 12)
    whole = keyed_dropout(x, 0.5, DRAW)
    for i, piece in enumerate(x.chunk(parts, dim)):
        assert torch.equal(
            keyed_dropout(piece, 0.5, DRAW, EqualPart(dim, parts, i)), whole.chunk(parts, dim)[i]
        )


def test_odd_features_leave_words_half_used() -> None:
    x = ones(1, 9, 3)
    whole = keyed_dropout(x, 0.5, DRAW)
    for i in range(9):
        assert torch.equal(keyed_dropout(x[:, i : i + 1], 0.5, DRAW, EqualPart(1, 9, i)), whole[:, i : i + 1])


@pytest.mark.parametrize("width", [1, 3, 8])
def test_rows_of_features(width: int) -> None:
    whole = keyed_dropout(ones(5, 2 * width), 0.5, DRAW)
    for b in range(5):
        draw = DRAW._replace(first_sample=4 + b)
        assert torch.equal(keyed_dropout(ones(1, 2 * width), 0.5, draw), whole[b : b + 1])
    for i in range(2):
        assert torch.equal(keyed_dropout(ones(5, width), 0.5, DRAW, EqualPart(1, 2, i)), whole.chunk(2, 1)[i])
    one = keyed_dropout(ones(5), 0.5, DRAW)
    assert torch.equal(keyed_dropout(ones(3), 0.5, DRAW._replace(first_sample=6)), one[2:])


def test_one_token_of_each_sample_is_no_row() -> None:
    rows = DRAW._replace(samples=3)
    whole = keyed_dropout(ones(3, 2, 8), 0.5, DRAW)
    for i in range(2):
        assert torch.equal(keyed_dropout(ones(3, 8), 0.5, rows, EqualPart(0, 2, i)), whole[:, i])


def test_tokens_laid_out_as_rows() -> None:
    whole = keyed_dropout(ones(2, 6, 8), 0.5, DRAW)
    rows = DRAW._replace(samples=2)
    assert torch.equal(keyed_dropout(ones(12, 8), 0.5, rows).view(2, 6, 8), whole)
    for i in range(2):
        part = keyed_dropout(ones(6, 8), 0.5, rows, EqualPart(0, 2, i)).view(2, 3, 8)
        assert torch.equal(part, whole.chunk(2, 1)[i])


def test_a_first_dim_that_is_no_batch() -> None:
    """Position embeddings [T, D], say: one sample's bits, others on every rank."""
    draw = DRAW._replace(samples=4)
    first = keyed_dropout(ones(6, 8), 0.5, draw)
    assert not torch.equal(first, keyed_dropout(ones(6, 8), 0.5, draw._replace(first_sample=8)))


def test_every_coordinate_changes_the_mask() -> None:
    draws = [
        DRAW,
        DRAW._replace(key=KEY ^ 1),
        DRAW._replace(step=8),
        DRAW._replace(first_sample=5),
        DRAW._replace(call=1),
    ]
    masks = {tuple(keyed_dropout(ones(1, 64), 0.5, draw).flatten().tolist()) for draw in draws}
    assert len(masks) == len(draws)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_share_and_mean(p: float) -> None:
    y = keyed_dropout(ones(4, 256, 256), p, DRAW)
    n = y.numel()
    assert abs((y == 0).double().mean().item() - p) < 6 * math.sqrt(p * (1 - p) / n) + 2**-17
    assert abs(y.mean().item() - 1) < 6 * math.sqrt(p / (1 - p) / n)
    assert y.max() == 2**16 / (2**16 - round(p * 2**16))


def test_nothing_and_everything() -> None:
    x = torch.randn(2, 3)
    assert keyed_dropout(x, 0.0, DRAW) is x
    assert not keyed_dropout(x, 1.0, DRAW).any()
    assert keyed_dropout(x[:0], 0.5, DRAW).shape == (0, 3)
    assert not keyed_dropout(ones(1, 4096), 1 - 2**-16, DRAW).count_nonzero() > 4
    with pytest.raises(ValueError, match="p is 1.5; expected a share between 0 and 1"):
        keyed_dropout(x, 1.5, DRAW)


def test_gradient() -> None:
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: keyed_dropout(x, 0.5, DRAW), x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_dtypes_share_the_mask(dtype: torch.dtype) -> None:
    y = keyed_dropout(torch.ones(2, 8, 8, dtype=dtype), 0.25, DRAW)
    assert y.dtype == dtype
    assert torch.equal(y != 0, keyed_dropout(ones(2, 8, 8), 0.25, DRAW) != 0)


def test_one_byte_an_element_is_kept() -> None:
    kept = []
    x = torch.randn(4, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        keyed_dropout(x, 0.5, DRAW)
    assert [(t.dtype, t.shape) for t in kept] == [(torch.uint8, x.shape)]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("substream", [(0, 0, 0), (1, 2, 3), (5, (1 << 64) - 4, 1 << 63)])
@pytest.mark.parametrize(("start", "stop"), [(0, 1), (3, 41), (4 * 10**12 + 2, 4 * 10**12 + 11)])
def test_a_device_computes_the_same_words(substream: tuple, start: int, stop: int, count: int) -> None:
    """What an accelerator runs, here on the processor."""
    one, two, three = substream
    for key in (KEY, (1 << 64) - 1, 0):
        words = philox.words_on(torch.device("cpu"), key, start, stop, substream, count)
        expected = philox.words_of(key, start, stop, [(one, two + i, three) for i in range(count)])
        assert torch.equal(words, torch.from_numpy(expected.view("int64")))


@pytest.mark.parametrize("cut", [None, EqualPart(-1, 3, 1)], ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 7), (4, 2, 3, 3)], ids=str)
def test_a_device_draws_all_samples_at_once(
    shape: tuple[int, ...], cut: EqualPart | None, monkeypatch
) -> None:
    """As many operations for one sample as for many, and the processor's mask."""
    x = torch.randn(shape)
    expected = keyed_dropout(x, 0.4, DRAW, cut)
    monkeypatch.setattr(philox, "words_of", None)
    counts = []
    for samples in (1, shape[0]):
        with Operations() as counted:
            kept = dropout.keep((samples, *shape[1:]), round(0.4 * 2**16), DRAW, cut, NotTheHost("cpu"))
        counts.append(counted.count)
    assert counts[0] == counts[1] < 450
    assert torch.equal(x * kept * (2**16 / (2**16 - round(0.4 * 2**16))), expected)


class Operations(TorchDispatchMode):
    """Counts what would run on a device: views are free."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += not function.is_view
        return function(*args, **(kwargs or {}))


class NotTheHost(str):
    """Passes for a device of another type; torch makes tensors on the processor."""

    type = "elsewhere"


@pytest.mark.gpu
def test_a_device_drops_the_same() -> None:
    device = torch.accelerator.current_accelerator()
    for cut in (None, EqualPart(1, 3, 2)):
        x = ones(2, 5, 7)
        assert torch.equal(
            keyed_dropout(x.to(device), 0.5, DRAW, cut).cpu(), keyed_dropout(x, 0.5, DRAW, cut)
        )


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_compiled_graph_drops_the_same_and_serves_every_step() -> None:
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=graphs, fullgraph=True)
    def run(x: Tensor, step: int) -> Tensor:
        return keyed_dropout(x, 0.5, DRAW._replace(step=step), EqualPart(1, 2, 1))

    for step in range(5):
        x = torch.randn(2, 3, 4, requires_grad=True)
        y = run(x, step)
        expected = keyed_dropout(x, 0.5, DRAW._replace(step=step), EqualPart(1, 2, 1))
        assert torch.equal(y, expected)
        (grad,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(grad, torch.autograd.grad(expected.sum(), x)[0])
    assert graphs.frame_count <= 3  # 0 and 1 are constants to the compiler


def test_a_wrong_part_would_be_seen() -> None:
    """The suite's own check: the mask of the neighbour's part is another one."""
    a, b = (
        dropout.keep((1, 4, 64), 1 << 15, DRAW, EqualPart(1, 2, part), torch.device("cpu")) for part in (0, 1)
    )
    assert not torch.equal(a, b)
