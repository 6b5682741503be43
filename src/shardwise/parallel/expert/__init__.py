"""Mixtures of experts: each token goes through the few experts that its router chose.

policy        what the user may set            router   scores, choice, room and weights of a token's experts
surroundings  what a layer knows of its ranks  balance  the loss and the bias that spread tokens over experts
module        the layer: its own reference     dispatch rows to the ranks of their experts and back
cost          rows and elements in closed form
"""
