"""Mixtures of experts: each token goes through the few experts that its router chose.

policy        what the user may set            router    scores, choice and weights of a token's experts
surroundings  a layer's ranks and microbatch   capacity  which pairs there is room for
noise         of a router, keyed by position   balance   the loss and the bias that spread tokens over experts
experts       stacks of parameters             module    the layer, which is its own reference
dispatch      sends rows to the ranks of their experts and back
stacks        which tensors of any model hold experts, and how these are cut
transformers_experts                     the computation of experts of transformers' classes
cost          rows and bytes in closed form
"""
