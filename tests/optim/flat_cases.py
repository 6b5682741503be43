"""Optimizers and sizes for tests of flat parameters."""

from typing import Any

from torch import optim

from shardwise.optim.lion import Lion

SIZES = (3, 1, 4, 2)
"""Parameters; the flat buffer has two elements of padding behind each."""


STARTS = [sum(SIZES[:i]) + 2 * i for i in range(len(SIZES))]


TOTAL = sum(SIZES) + 2 * len(SIZES)


AS_MADE: list[dict[str, Any]] = [{}]
"""Numbers of the only group: those that the optimizer was made with."""


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda ps: optim.AdamW(ps, lr=0.1, weight_decay=0.3),
    "amsgrad": lambda ps: optim.Adam(ps, lr=0.1, amsgrad=True),
    "sgd": lambda ps: optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.1),
    "nadam": lambda ps: optim.NAdam(ps, lr=0.1),
    "rmsprop": lambda ps: optim.RMSprop(ps, lr=0.1, centered=True, momentum=0.5),
    "adagrad": lambda ps: optim.Adagrad(ps, lr=0.1, initial_accumulator_value=0.5),
    "asgd": lambda ps: optim.ASGD(ps, lr=0.1),
    "adadelta": lambda ps: optim.Adadelta(ps, lr=0.1),
    "adamax": lambda ps: optim.Adamax(ps, lr=0.1),
    "radam": lambda ps: optim.RAdam(ps, lr=0.1),
    "rprop": lambda ps: optim.Rprop(ps, lr=0.1),
    "lion": lambda ps: Lion(ps, lr=0.1, weight_decay=0.3),
}
