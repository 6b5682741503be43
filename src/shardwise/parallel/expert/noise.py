"""Noise of a router, keyed by position as dropout is: the same on every layout and in recomputations.

    u(b, t, c) = uniform number t·W + c of Philox's substream (call, first_sample + b, step) under the layer's key

Without an engine, which provides step and sample, torch's generator draws the numbers.

Cost:   one word of 8 bytes an element; on a device one launch and no wait of the host (kernels/uniform.py).
Shapes: n tokens of this rank at positions b·T + t, W numbers of a token.
"""

import torch
from torch import Tensor

from shardwise.kernels.philox import key_of, uniform_of
from shardwise.kernels.uniform import uniform_rows
from shardwise.parallel.expert.surroundings import ExpertContext, RoutedTokens

_JITTER = 0.01


def jitter(surroundings: ExpertContext, tokens: RoutedTokens, width: int) -> Tensor:
    """Return factors of the router's input, between 1 - 0.01 and 1 + 0.01: fp64 [n, width]."""
    return 1 + _JITTER * (2 * uniform(surroundings, tokens, width) - 1)


def gumbel(surroundings: ExpertContext, tokens: RoutedTokens, experts: int) -> Tensor:
    """Return Gumbel noise -ln(-ln u): fp64 [n, experts].

    The index of the largest of logits + noise is a draw from their softmax.
    """
    return -(-uniform(surroundings, tokens, experts).log()).log()


def uniform(surroundings: ExpertContext, tokens: RoutedTokens, width: int) -> Tensor:
    """Return ``width`` numbers for each token, uniform in (0, 1): fp64 [n, width] on the tokens' device."""
    replay, place, device = surroundings.replay, tokens.place, tokens.place.device
    if replay is None:
        return torch.rand(len(place), width, dtype=torch.float64, device=device).clamp_min(2.0**-54)
    if not replay.has_numbers:
        return torch.empty(len(place), width, dtype=torch.float64, device=device)
    at, stream = replay.place, f"router:{surroundings.name}"
    key, call = key_of(surroundings.seed, stream), replay.next_call(stream)
    if device.type != "cpu":
        sequence = tokens.sequence
        starts = (place - sequence * tokens.length) * width
        return uniform_rows(starts, at.first_sample + sequence, width, key, call, at.step)
    out = torch.empty(len(place), width, dtype=torch.float64)
    samples, positions = tokens.sequence, place % max(tokens.length, 1)
    breaks = (place.diff() != 1) | (samples.diff() != 0)
    stops = [*(breaks.nonzero().flatten() + 1).tolist(), len(place)]
    start = 0
    for stop in stops if len(place) else []:  # runs of neighbours in one sequence
        first = int(positions[start])
        substream = (call, at.first_sample + int(samples[start]), at.step)
        drawn = uniform_of(key, first * width, (first + stop - start) * width, [substream])
        out[start:stop] = drawn.view(-1, width)
        start = stop
    return out
