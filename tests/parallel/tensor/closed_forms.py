"""Cost of tensor parallelism in collectives, elements and kept activations; tests compare the figures with counts.

Collectives of one block and of the rest of a language model, forward and backward, and the elements that a rank sends,
with P = B·T·D elements of an activation and N ranks (r gathers, each P (N-1)/N; an all-reduce is two):

                        whole sequence            cut sequence
    block    forward    2 all-reduce              2 all-gather, 2 reduce-scatter
             backward   2 all-reduce              4 all-gather, 2 reduce-scatter        8 r against 10 r
    embedding           1 all-reduce              1 reduce-scatter, 1 all-gather        2 r            2 r
    head                1 all-reduce              2 all-gather, 1 reduce-scatter        2 r            3 r
    loss                1 all-gather of 3 numbers a token, or 1 for each tile of tokens

In k pieces (``tensor.overlap``) a block's forward pass makes k calls for each of these, and the head's gather is k
calls, of as many elements together.

The column layers' second gather, of their input in backward, is the price of keeping only a shard of the input.

Of the activations that one block of our Gpt keeps for its backward pass (``tests/passes/closed_forms.py``) a rank
keeps the part of its heads and of its hidden features, with at least one key and value head. With a cut sequence the
rank keeps only its tokens of activations that span all features: residuals and norms.

Papers: Korthikanti et al. 2022, arXiv:2205.05198, section 4 (which counts dropout masks, in bytes of 16 bits).
Shapes: B batch, T sequence, D width, H heads, K head size, F hidden.
"""

from dataclasses import dataclass

from shardwise.parallel.tensor.layout import divided
from shardwise.plan.placement import Partial, Replicate, Shard, elements_sent
from tests.passes.closed_forms import BlockShape, kept_elements


@dataclass(frozen=True)
class Calls:
    """Numbers of collectives, by operation."""

    all_reduce: int = 0
    all_gather: int = 0
    reduce_scatter: int = 0

    def __add__(self, other: "Calls") -> "Calls":
        return Calls(
            self.all_reduce + other.all_reduce,
            self.all_gather + other.all_gather,
            self.reduce_scatter + other.reduce_scatter,
        )

    def times(self, number: int) -> "Calls":
        """Return the counts multiplied by ``number``."""
        return Calls(self.all_reduce * number, self.all_gather * number, self.reduce_scatter * number)


def block_calls(sequence: bool, pieces: int = 1) -> Calls:
    """Return the collectives of one block, forward and backward, with or without a cut sequence."""
    forward = 2 * pieces
    return Calls(all_gather=4 + forward, reduce_scatter=2 + forward) if sequence else Calls(2 + forward)


def rest_calls(sequence: bool, pieces: int = 1) -> Calls:
    """Return the collectives of embedding and head, forward and backward.

    The all-gather of the loss is not included.

    Args:
        sequence: True for a cut sequence.
        pieces: Pieces of the products in the forward pass.

    Returns:
        The counts.
    """
    return Calls(all_gather=2 + pieces, reduce_scatter=2) if sequence else Calls(all_reduce=2)


def elements_sent_per_pass(
    layers: int, batch: int, tokens: int, width: int, ranks: int, sequence: bool
) -> int:
    """Return the elements of activations that one rank sends in one forward and backward pass of a language model.

    Args:
        layers: Number of blocks.
        batch: Samples of a microbatch.
        tokens: Length of the whole sequence.
        width: Features of an activation.
        ranks: Size of the "tp" axis.
        sequence: True for a cut sequence.

    Returns:
        The number of elements.
    """
    calls = block_calls(sequence).times(layers) + rest_calls(sequence)
    activation = batch * tokens * width
    return (
        calls.all_reduce * elements_sent(Partial(), Replicate(), activation, ranks)
        + calls.all_gather * elements_sent(Shard(), Replicate(), activation, ranks)
        + calls.reduce_scatter * elements_sent(Partial(), Shard(), activation, ranks)
        + elements_sent(Shard(), Replicate(), 3 * batch * tokens * ranks, ranks)
    )


def kept_activation_elements(shape: BlockShape, ranks: int, sequence: bool) -> int:
    """Return the elements that one block keeps on one rank from forward to backward, without recomputation and dropout.

    Args:
        shape: Shape of the block before the cut.
        ranks: Size of the "tp" axis.
        sequence: True for a cut sequence.

    Returns:
        The number of elements.
    """
    here = shape._replace(
        heads=shape.heads // ranks, kv_heads=divided(shape.kv_heads, ranks), hidden=shape.hidden // ranks
    )
    return kept_elements(here, "none", ranks if sequence else 1)
