"""What ``verify`` says of each seeded bug: the first wrong tensor, and the sentence that explains it.

Both are patterns of ``fnmatch`` on the whole text of the verdict. A bug without a sentence has the reason why none of
the explanations can fit. ``mended`` says why the first wrong tensor is another one than the kind and name in bugs.py:
that list has only tensors that a step computes at its end, and ``verify`` also sees what comes before them.
"""

from fnmatch import fnmatchcase
from typing import NamedTuple

from shardwise.verify.verdict import FirstWrong


class ExpectedVerdict(NamedTuple):
    """The verdict on one bug."""

    name: str
    """Pattern of the first wrong tensor."""
    sentence: str = ""
    """Pattern of the explanation; empty if none can fit."""
    unexplained: str = ""
    """The reason why no explanation can fit."""
    mended: str = ""
    """The reason for another name than that of the list."""

    def is_named(self, first: FirstWrong | None) -> bool:
        """True if the verdict names the right tensor."""
        return first is not None and fnmatchcase(first.name, _literal(self.name))

    def is_explained(self, first: FirstWrong | None) -> bool:
        """True if the verdict has the right explanation of the right tensor."""
        is_said = first is not None and fnmatchcase(first.explanation, _literal(self.sentence))
        return bool(self.sentence) and is_said and self.is_named(first)


def _literal(pattern: str) -> str:
    """Return a pattern in which brackets stand for themselves."""
    return pattern.replace("[", "[[]")


_E = ExpectedVerdict
_MISSING = "the addends of {}: missing in the sum"
_MASK = "* other elements are zero than in the right tensor; the elements that are zero in neither are right"
_LOSS_OF_HEAD = "the head computes logits and loss in one call, and the loss is one number"
_UPDATE = "and the rest is right"

VERDICTS: dict[str, ExpectedVerdict] = {
    # Sums over tp
    "norm gradients not summed": _E("norm.weight, step 0", _MISSING.format("the ranks at tp=1")),
    "averaged over tp": _E("norm.weight, step 0", "it is the right tensor times 1/tp = 1/2"),
    "replicas not reduced": _E(
        "blocks.3.attention.qkv.weight, step 0",
        _MISSING.format("copy 1 of the elements that neighbours along tp hold both"),
    ),
    "copies in the norm, tp": _E(
        "norm, step 0", "it counts elements that several ranks of the model hold once for each of these ranks"
    ),
    "sequence gradient not summed": _E(
        "gradient of the output of norm, microbatch 0, step 0",
        unexplained="each rank has a slice of its own addend, and no rank has the rest of any addend",
        mended="the gradient of an output comes before those of weights",
    ),
    "pieces of the neighbour": _E(
        "blocks.0.attention.out, microbatch 0, step 0",
        unexplained="each message of the overlapped product exchanges its own pieces, so no order of blocks is right",
    ),
    "column gradient not summed": _E(
        "gradient of the output of norm, microbatch 0, step 0",
        "each of the 2 ranks along tp holds an addend: the sum over these ranks is missing",
    ),
    "column gradient averaged": _E(
        "gradient of the output of norm, microbatch 0, step 0", "it is the right tensor times 1/tp = 1/2"
    ),
    "row bias on every rank": _E("blocks.3.mlp.down.bias, step 0", "it is the right tensor times tp = 2"),
    "row bias lost": _E("blocks.3.mlp.down.bias, step 0", "it is zero"),
    "row output not summed": _E(
        "blocks.0.mlp.down, microbatch 0, step 0",
        "each of the 2 ranks along tp holds an addend: the sum over these ranks is missing",
    ),
    "gathered in another order": _E(
        "blocks.0.attention.qkv, microbatch 0, step 0", "its 2 blocks along dim 1 stand in the order [1, 0]"
    ),
    "first positions everywhere": _E(
        "positions, microbatch 0, step 0", "of 2 blocks along dim 0 block 1 is a copy of block 0"
    ),
    "rotary base by rank": _E(
        "input 1 of blocks.0, microbatch 0, step 0",
        unexplained="angles to another base are another function of the positions",
        mended="the model computes the angles before its first block, and hands them to the block",
    ),
    "mask shows the next token": _E(
        "input 0 of blocks.0.attention.out, microbatch 0, step 0",
        unexplained="attention over another set of keys is another function of the inputs",
    ),
    "loss of the first rows": _E("head, microbatch 0, step 0", unexplained=_LOSS_OF_HEAD),
    "loss of unlike maxima": _E("head, microbatch 0, step 0", unexplained=_LOSS_OF_HEAD),
    "padding of the vocabulary counts": _E("head, microbatch 0, step 0", unexplained=_LOSS_OF_HEAD),
    "kv copy updated apart": _E(
        "blocks.0.attention_norm.weight, step 0",
        "its update is the right one times 2",
        mended="the rank steps with another rate in all of its weights, and the norm before is a copy too",
    ),
    "norm declared replicate": _E("blocks.3.mlp_norm.weight, step 0", _MISSING.format("the ranks at tp=1")),
    "norm before attention declared replicate": _E(
        "blocks.3.attention_norm.weight, step 0", _MISSING.format("the ranks at tp=1")
    ),
    "last norm declared replicate": _E("norm.weight, step 0", _MISSING.format("the ranks at tp=1")),
    "last norm declared whole": _E("norm.weight, step 0", _MISSING.format("the ranks at tp=1")),
    "norm gradients not summed in a pipeline": _E(
        "norm.weight, step 0", _MISSING.format("the ranks at tp=1")
    ),
    # Pipelines
    "tied gradient lost on tp": _E("embed.weight, step 0", _MISSING.format("stage 1")),
    "tied gradient lost": _E("embed.weight, step 0", _MISSING.format("stage 2")),
    "tied gradient doubled": _E("embed.weight, step 0", "it is the right tensor times 2"),
    "ties in the norm, pp": _E(
        "norm, step 0", "it counts elements that several ranks of the model hold once for each of these ranks"
    ),
    "weights of microbatches ignored": _E(
        "gradient of the output of head, microbatch 0, step 0",
        "the microbatch counts * in place of * in the mean of the step",
    ),
    "norm of one stage": _E("norm, step 0", "it is the norm of stage 0 alone"),
    "targets of another microbatch": _E(
        "input 3 of blocks.2, microbatch 0, step 0",
        "it is the input of blocks.2 in microbatch 1 of step 0",
        mended="the blocks get the number of targets of each sequence, before the loss gets the targets",
    ),
    "activation of another microbatch": _E(
        "input 0 of blocks.2, microbatch 1, step 0", "it is the input of blocks.2 in microbatch 0 of step 0"
    ),
    "gradient of another microbatch": _E(
        "gradient of the output of blocks.1.mlp, microbatch 1, step 0",
        "it is the gradient of the output of blocks.1.mlp in microbatch 0 of step 0",
    ),
    "gradient halved between stages": _E(
        "gradient of the output of blocks.1.mlp, microbatch 0, step 0",
        "it is the right tensor times 1/pp = 1/2",
    ),
    "microbatch dropped by the last stage": _E(
        "gradient of the output of head, microbatch 1, step 0", "it is zero"
    ),
    "activation of another stage": _E(
        "input 0 of blocks.3, microbatch 0, step 0", "it is the input of blocks.1 in microbatch 0 of step 0"
    ),
    # Data-parallel sums
    "not summed over dp": _E("head.weight, step 0", _MISSING.format("the ranks at dp=1")),
    "averaged over dp": _E("head.weight, step 0", "it is the right tensor times 1/dp = * = 1/2"),
    "summed twice over dp": _E("head.weight, step 0", "it is the right tensor times dp = * = 2"),
    "norm addend missing": _E("norm.weight, step 0", _MISSING.format("the ranks at dp=1")),
    "norm addend doubled": _E(
        "blocks.1.mlp_norm.weight, step 0", "the addends of the ranks at dp=1: counted twice in the sum"
    ),
    "rows of the embedding lost": _E("embed.weight, step 0", f"[0:9, 0:16] is zero, {_UPDATE}"),
    "copies not summed": _E("head.weight, step 0", _MISSING.format("replica 1")),
    "summed over the wrong group": _E(
        "head.weight, step 0", unexplained="it adds up different ranges of the tensor"
    ),
    "gradient off by one": _E(
        "head.weight, step 0", "elements [0, 304) of the flattened tensor are shifted by -1 places"
    ),
    "gradient range of the neighbour": _E(
        "head.weight, step 0", "its 2 blocks of the flattened tensor stand in the order [1, 0]"
    ),
    # Microbatches
    "last reduction skipped": _E("head.weight, step 0", _MISSING.format("microbatch 1 of each rank")),
    "last reduction skipped in a pipeline": _E(
        "head.weight, step 0", _MISSING.format("microbatch 2 of each rank")
    ),
    "microbatch overwrites": _E("head.weight, step 0", _MISSING.format("microbatch 0 of each rank")),
    "microbatch counted twice": _E(
        "gradient of the loss, microbatch 0, step 0", "it is the right number times * = 2"
    ),
    "microbatch dropped": _E("gradient of the loss, microbatch 0, step 0", "it is zero"),
    "microbatch dropped on one rank": _E("gradient of the loss, microbatch 3, step 0", "it is zero"),
    "mean of means over dp": _E(
        "gradient of the loss, microbatch 0, step 0",
        "the microbatch counts * in place of * in the mean of the step",
    ),
    "divided by microbatches twice": _E(
        "gradient of the loss, microbatch 0, step 0", "it is the right number times * = 1/microbatches = 1/2"
    ),
    "microbatches summed": _E(
        "gradient of the loss, microbatch 0, step 0", "it is the right number times * = microbatches = 2"
    ),
    "loss scale left in": _E(
        "head.weight, step 0", unexplained="only fp16 has a loss scale, and nothing fits to 10^-6 in 16 bits"
    ),
    # Gathers
    "stale weights": _E(
        "embed.weight in the forward pass of microbatch 0, step 1",
        "it is the weight at the start",
        mended="the gathered weight comes before the output of its module",
    ),
    "gathered before the update": _E(
        "embed.weight, step 0",
        f"the update of elements [0, 152) of the flattened tensor is missing, {_UPDATE}",
    ),
    "never gathered": _E(
        "embed.weight, step 0",
        f"the update of elements [0, 152) of the flattened tensor is missing, {_UPDATE}",
    ),
    "gathered off by one": _E(
        "embed.weight, step 0", "elements [0, 152) of the flattened tensor are shifted by -1 places"
    ),
    "shard off by one": _E(
        "embed.weight in the forward pass of microbatch 0, step 0",
        "elements [0, 304) of the flattened tensor are shifted by -1 places",
        mended="the gathered weight comes before the output of its module",
    ),
    "shard of one rank is zero": _E(
        "embed.weight in the forward pass of microbatch 0, step 0",
        f"elements [152, 304) of the flattened tensor are zero, {_UPDATE}",
        mended="the gathered weight comes before the output of its module",
    ),
    # Norm and clipping
    "norm of one rank": _E("norm, step 0", "it counts the squares of the ranks at dp=0 alone"),
    "every copy in the norm": _E("norm, step 0", "it is the right number times √replicas = 1.41421"),
    "norm without a unit": _E("norm, step 0", "it leaves out the squares of one Unit: head.weight"),
    "clipped before unscaling": _E(
        "norm, step 0", "it is the right number times the divisor of the step's sums = *"
    ),
    "clipped twice": _E(
        "embed.weight exp_avg, step 0", "it is the right tensor times the clip factor = 0.7*"
    ),
    "never clipped": _E(
        "embed.weight exp_avg, step 0", "it is the right tensor times 1/(the clip factor) = 1.*"
    ),
    "clipped by the square": _E(
        "embed.weight exp_avg, step 0", "it is the right tensor times 1/(the clip factor) = 1.*"
    ),
    # Optimizer
    "rate of one rank": _E(
        "embed.weight, step 0",
        f"the update of elements [152, 304) of the flattened tensor is the right one times 2, {_UPDATE}",
    ),
    "rate of one copy": _E("embed.weight, step 0", "its update is the right one times 2"),
    "update skipped by one rank": _E(
        "step count of norm.weight, step 0",
        "it counts 0 updates in place of 1",
        mended="step counts are compared before the copies of weights",
    ),
    "decay on every group": _E(
        "blocks.0.attention_norm.weight, step 0", "its update has a weight decay of 0.1 in place of 0"
    ),
    "decay doubled": _E(
        "embed.weight, step 0", "its update is one with twice the weight decay; this is update 1"
    ),
    "betas swapped": _E(
        "embed.weight exp_avg, step 0", "it is the right tensor times (1 - beta2) / (1 - beta1) = 1/2"
    ),
    "moments of a neighbour": _E(
        "embed.weight exp_avg, step 0", "elements [0, 304) of the flattened tensor are shifted by 1 places"
    ),
    "second moments forgotten": _E("embed.weight exp_avg_sq, step 0", "it is zero"),
    "bias correction restarts": _E(
        "step count of norm.weight, step 0",
        "it counts 0 updates in place of 1",
        mended="the step count is wrong one step before the update that it corrects",
    ),
    "masters lost": _E("embed.weight, step 0", "it is rounded to bfloat16"),
    # Experts
    "expert gradients ep times": _E(
        "blocks.1.mlp.experts.down, step 0", "it is the right tensor times dp = ep = * = 2"
    ),
    "router addend missing": _E("blocks.1.mlp.router.weight, step 0", _MISSING.format("the ranks at dp=1")),
    "rows return to the neighbour": _E(
        "blocks.0.mlp.experts, microbatch 0, step 0",
        unexplained="the rows of a message are weighted and added up after they were shifted",
    ),
    "experts swapped": _E(
        "blocks.0.mlp.experts, microbatch 0, step 0",
        unexplained="the output of an expert for rows of another was computed nowhere in the reference",
    ),
    "expert weights of one rank even": _E(
        "input 2 of blocks.0.mlp.experts, microbatch 1, step 0", "all its elements are 0.5"
    ),
    # Sequences that are cut
    "gradients of keys stay abroad": _E(
        "gradient of the output of blocks.3.attention.qkv, microbatch 0, step 0",
        unexplained="the gradients that each rank computes for keys of another rank were recorded nowhere",
    ),
    "positions of a part begin anew": _E(
        "input 1 of blocks.0, microbatch 0, step 0", "of 4 blocks along dim 0 block 1 is a copy of block 0*"
    ),
    "targets of other tokens": _E(
        "input 1 of head, microbatch 0, step 0",
        unexplained="targets are whole numbers of another place, and places are compared only with those of parts",
    ),
    "parts count alike": _E(
        "loss, step 0", unexplained="the mean of the losses of parts is no multiple of the right loss"
    ),
    "copies in the norm, cp": _E(
        "norm, step 0", "it counts elements that several ranks of the model hold once for each of these ranks"
    ),
    "keys of other ranks are not seen": _E(
        "input 0 of blocks.0.attention.out, microbatch 0, step 0",
        unexplained="attention to some of the keys was computed nowhere in the reference",
    ),
    "ends of documents are ignored": _E(
        "input 0 of dropout, microbatch 0, step 0",
        unexplained="tokens of a later document take embeddings of positions that no token of their places has",
    ),
    "positions go on through documents": _E(
        "input 0 of dropout, microbatch 0, step 0",
        unexplained="tokens of a later document take embeddings of positions that no token of their places has",
    ),
    "windows are longer by one": _E(
        "input 0 of blocks.0.attention.out, microbatch 0, step 0",
        unexplained="attention to one key more was computed nowhere in the reference",
    ),
    "a sink counts twice": _E(
        "input 0 of blocks.0.attention.out, microbatch 0, step 0",
        unexplained="each token and head is too small by a share of its own",
    ),
    # Backward passes in two parts
    "products are forgotten": _E(
        "blocks.3.mlp.down.bias, which the layout does not have, step 0", "it is zero"
    ),
    "products of another sample": _E(
        "blocks.3.mlp.down.weight, step 0",
        unexplained="the product of a gradient and the input of another sample was computed nowhere",
    ),
    "vectors counted in both halves": _E(
        "blocks.3.mlp.down.bias, step 0", "it is the right tensor times * = 2"
    ),
    # Dropout
    "masks by rank": _E("dropout, microbatch 0, step 0", _MASK),
    "first mask on a cut sequence": _E("dropout, microbatch 0, step 0", _MASK),
    "masks of the first sample": _E(
        "dropout, microbatch 1, step 0",
        "other elements are zero, those of the output of dropout in microbatch 0 of step 0; *",
    ),
    "masks of the first step": _E("dropout, microbatch 0, step 0", _MASK),
    "recomputed with other masks": _E(
        "blocks.3", "recompute: block blocks.3 computes other numbers the second time*"
    ),
    "part of the first": _E("transformer.h.0.attn.resid_dropout, microbatch 0, step 0", _MASK),
    "parts where it is whole": _E("transformer.drop, microbatch 0, step 0", _MASK),
    "whole where it is cut": _E("transformer.h.0.attn.resid_dropout, microbatch 0, step 0", _MASK),
    # A user's model
    "a layer that one rank skips": _E(
        "blocks.2, microbatch 1, step 0", "the module did not run for this microbatch"
    ),
    "a factor on one rank": _E(
        "input 0 of blocks.2, microbatch 1, step 0",
        unexplained="one of two summands is wrong, and neither their sum nor their product is an output of a module",
        mended="the model multiplies the block's output in its own code, behind the block",
    ),
    "a loss without the last tokens on one rank": _E(
        "loss, microbatch 1, step 0", unexplained="a mean over other tokens is another number"
    ),
    "a loss doubled on one rank": _E("loss, microbatch 1, step 0", "it is the right number times * = 2"),
    "start weights by rank": _E("blocks.3.weight at the start, step 0", "it is the right tensor times 1.5"),
}

UNSEEN: dict[str, str] = {}
"""Bugs that verify does not find yet, and why. Names and explanations of these are not known either."""
