"""Cost of recomputation in closed form: elements that a transformer block keeps, and operations that are repeated.

Elements that one block keeps per token for its backward pass without recomputation, each storage once, dropout off:

    family   norms             projections' inputs    attention       feed-forward
    llama    2·(D + 1)         D + H·K + D + F        (H + 2N)·K + S  3F   gate, up, and silu(gate)
    gpt2     2·(D + 2)         D + H·K + D + F        (H + 2N)·K + S  F    up

Every scope keeps the block's input (one of the 2·D under the norms). S are the attention weights: H times the score
elements of ``kernels.attention`` over T if that kernel keeps them, else none.

With ``tiles.mlp`` a block keeps only the input of its feed-forward part, and its backward pass runs all of the part
again.

    full         keeps D                 repeats all products but the last, whose output is not needed
    selective    keeps all but S         repeats the two products of the attention: 4·K·S operations a token

If the whole square is kept (S = H·T) and H·K = D, F = 4·D, that is H·T out of 16·D + H·T elements, for 4·D·T of the
24·D² + 4·D·T operations of a block's forward pass: the argument of arXiv:2205.05198, section 5.

Shapes: B batch, T sequence, D width, H heads, N key and value heads, K head size, F hidden.
"""

from typing import Literal, NamedTuple

from shardwise.kernels.attention import _KEEP_UP_TO, _blocks

Scope = Literal["none", "full", "selective"]


class BlockShape(NamedTuple):
    """Sizes of one block and of its input."""

    batch: int
    sequence: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    hidden: int
    is_gated: bool
    """True for SwiGLU and RMSNorm (llama), False for GELU and LayerNorm (gpt2)."""


def kept_elements(shape: BlockShape, scope: Scope, pieces: int = 1, tiled_mlp: bool = False) -> int:
    """Return the elements that one block keeps between forward and backward, its input included.

    Args:
        shape: Shape of the block.
        scope: Scope of recomputation.
        pieces: Number of ranks over which the sequence is cut in front of the projections (tensor parallelism).
        tiled_mlp: True if the feed-forward part works by tiles of tokens; its gathered input is then kept.

    Returns:
        The number of elements.
    """
    tokens, d, f = shape.batch * shape.sequence, shape.width, shape.hidden
    if scope == "full":
        return tokens // pieces * d
    per_row, activations = (1, 3 * f) if shape.is_gated else (2, f)
    if tiled_mlp:
        f, activations = (0 if pieces == 1 else d - d // pieces), 0
    queries, values = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    before = tokens // pieces * (2 * (d + per_row) + 2 * d)
    kept = before + tokens * (queries + f + queries + 2 * values + activations)
    return kept + (_weights(shape, kept_by_kernel=True) if scope == "none" else 0)


def repeated_flops(shape: BlockShape, scope: Scope) -> int:
    """Return the floating-point operations that the backward pass of one block does a second time."""
    if scope == "none":
        return 0
    attention = 4 * shape.head_size * _weights(shape)
    if scope == "selective":
        return attention
    tokens, d = shape.batch * shape.sequence, shape.width
    queries, values = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    up = (2 if shape.is_gated else 1) * shape.hidden
    return 2 * tokens * d * (queries + 2 * values + queries + up) + attention


def _weights(shape: BlockShape, kept_by_kernel: bool = False) -> int:
    """Return the number of attention weights that are computed or, with ``kept_by_kernel``, kept."""
    if kept_by_kernel and shape.sequence > _KEEP_UP_TO:
        return 0
    scores = sum((stop - start) * stop for start, stop in _blocks(shape.sequence))
    return shape.batch * shape.heads * scores
