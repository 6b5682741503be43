"""What tensor parallelism costs, in collectives, elements and kept activations. Held to counts by tests.

Collectives of one block and of the rest of a language model, forward and backward, and what a rank sends with
P = B·T·D elements of an activation and N ranks (r gathers, each P (N-1)/N; an all-reduce is two):

                        whole sequence            cut sequence
    block    forward    2 all-reduce              2 all-gather, 2 reduce-scatter
             backward   2 all-reduce              4 all-gather, 2 reduce-scatter        8 r against 10 r
    embedding           1 all-reduce              1 reduce-scatter, 1 all-gather        2 r            2 r
    head                1 all-reduce              2 all-gather, 1 reduce-scatter        2 r            3 r
    loss                1 all-gather of 3 numbers a token, or 1 for each tile of tokens

The column layers' second gather, of their input in backward, is the price of keeping a shard of it.

Of the activations that one block of our Gpt keeps for its backward pass (``memory.recompute_cost``) a rank keeps those
of its heads and of its hidden features, of key and value heads at least one; with a cut sequence those of its tokens
where the block works on all features: residuals and norms.

Papers: Korthikanti et al. 2022, arXiv:2205.05198, section 4 (there with dropout masks, in bytes of 16 bits).
Shapes: B batch, T sequence, D width, H heads, K head size, F hidden.
"""

from dataclasses import dataclass

from shardwise.memory.recompute_cost import BlockShape, kept_elements
from shardwise.parallel.tensor.layout import divided
from shardwise.plan.placement import Partial, Replicate, Shard, elements_sent


@dataclass(frozen=True)
class Calls:
    """Collectives by operation."""

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
        """So many of them."""
        return Calls(self.all_reduce * number, self.all_gather * number, self.reduce_scatter * number)


def block_calls(sequence: bool) -> Calls:
    """Of one block, forward and backward."""
    return Calls(all_gather=6, reduce_scatter=4) if sequence else Calls(all_reduce=4)


def rest_calls(sequence: bool) -> Calls:
    """Of embedding and head, forward and backward; the loss has one all-gather more."""
    return Calls(all_gather=3, reduce_scatter=2) if sequence else Calls(all_reduce=2)


def elements_sent_per_pass(
    layers: int, batch: int, tokens: int, width: int, ranks: int, sequence: bool
) -> int:
    """Elements of activations that one rank sends in one forward and backward pass of a language model."""
    calls = block_calls(sequence).times(layers) + rest_calls(sequence)
    activation = batch * tokens * width
    return (
        calls.all_reduce * elements_sent(Partial(), Replicate(), activation, ranks)
        + calls.all_gather * elements_sent(Shard(), Replicate(), activation, ranks)
        + calls.reduce_scatter * elements_sent(Partial(), Shard(), activation, ranks)
        + elements_sent(Shard(), Replicate(), 3 * batch * tokens * ranks, ranks)
    )


def kept_activation_elements(shape: BlockShape, ranks: int, sequence: bool) -> int:
    """Elements that one block keeps on one rank from forward to backward, without recomputation and dropout.

    ``shape``: of the block before it is cut.
    """
    here = shape._replace(
        heads=shape.heads // ranks, kv_heads=divided(shape.kv_heads, ranks), hidden=shape.hidden // ranks
    )
    return kept_elements(here, "none", ranks if sequence else 1)
