"""What a transformer block keeps for its backward pass, and what recomputation repeats, in closed form.

Elements that one block keeps per token without recomputation, each storage once, dropout off:

    family   norms             projections' inputs    attention       feed-forward
    llama    2·(D + 1)         D + H·K + D + F        (H + 2N)·K + S  3F   gate, up, and silu(gate)
    gpt2     2·(D + 2)         D + H·K + D + F        (H + 2N)·K + S  F    up

The block's input (one of the 2·D under the norms) is kept by any scope. S are the attention weights: H times the score
elements of ``kernels.attention`` over T where it keeps them, else none.

With ``tiles.mlp`` a block keeps of its feed-forward part what enters it alone, and its backward pass runs all of the
part again.

    full         keeps D                 repeats all products but the last, whose output nobody needs
    selective    keeps all but S         repeats the two products of the attention: 4·K·S operations a token

Where the whole square is kept (S = H·T) and H·K = D, F = 4·D, that is H·T out of 16·D + H·T elements, for 4·D·T of the
24·D² + 4·D·T operations of a block's forward pass: the argument of arXiv:2205.05198, section 5.

Shapes: B batch, T sequence, D width, H heads, N key and value heads, K head size, F hidden.
"""

from typing import Literal, NamedTuple

from shardwise.kernels.attention import score_elements

Scope = Literal["none", "full", "selective"]


class BlockShape(NamedTuple):
    """One block and what runs through it."""

    batch: int
    sequence: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    hidden: int
    is_gated: bool
    """SwiGLU and RMSNorm (llama), or GELU and LayerNorm (gpt2)."""


def kept_elements(shape: BlockShape, scope: Scope, pieces: int = 1, tiled_mlp: bool = False) -> int:
    """Elements kept between forward and backward by one block, its input included.

    ``pieces``: into how many ranks' parts the sequence is cut in front of the projections (tensor parallelism).
    ``tiled_mlp``: the feed-forward part works by tiles of tokens, and its input is kept as all ranks' part has it.
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
    """Floating-point operations that the backward pass of one block does a second time."""
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
    """Attention weights that are computed, or those of them that are kept."""
    return shape.batch * shape.heads * score_elements(shape.sequence, kept=kept_by_kernel)
