"""Agreement: the comparison of the ranks' configurations and Plans before one of them builds anything.

Every rank runs a Plan that it derives from its own configuration and its own model. A key that differs on one rank
(``max_grad_norm: 0.5`` beside ``0.01``) makes no collective fail: each rank updates its shard of the weights by
another rule, the losses stay finite, and every weight is wrong. The ranks therefore compare two statements:

    the settings    every key of the configuration, and the arguments of ``initialize``; before any group is made,
                    because the mesh decides which groups there are
    the program     every parameter, every Unit, the strategies of the Units, the list of Actions of each class of
                    ranks, and the settings after ``auto`` is resolved; when the Plan is made

A statement is a flat mapping from a name to a value. The ranks exchange a digest of it, and only if the digests differ
the statements themselves, so that the refusal names the first entry that differs, with the values and the ranks.

Cost: one text of 32 characters per rank for the settings, one small all-reduce for the program.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from shardwise.base.policy import Policy
from shardwise.base.words import named_ranks
from shardwise.comm.world import World
from shardwise.config.run import RunConfig
from shardwise.plan.plan import Plan

Statement = Mapping[str, str]
"""Values as JSON text, keyed by name."""

PER_RANK = (
    "output_dir",  # only rank 0 writes there, and it sends the path to the others
    "monitor",  # only rank 0 reports
    "comm.device",  # a rank of one host names its own accelerator
    "comm.join_timeout_s",
    "comm.interface",  # every host has interfaces of its own
    "comm.debug_delay_s",
    "data.source",  # every host may hold a copy of its own; the content is compared when the data is opened
    "data.cache",
    "data.workers",
    "offload.disk_path",  # every host has disks of its own
    "train.sample_prompt",  # only rank 0 prints samples
)
"""Keys that ranks may set differently, with the keys below them."""
_SHOWN = 120
"""Number of characters of a value that an error message shows."""


def stated_settings(settings: RunConfig, **arguments: Any) -> Statement:
    """Return every key that all ranks must set alike, and the ``arguments`` of ``initialize`` as JSON text."""
    keys = dict(_flat("", settings.model_dump(mode="json")))
    kept = {key: value for key, value in keys.items() if not _is_per_rank(key)}
    words = {f"initialize({name}=)": value for name, value in arguments.items()}
    return {name: json.dumps(value, default=str, sort_keys=True) for name, value in {**kept, **words}.items()}


def stated_program(plan: Plan, settings: RunConfig) -> Statement:
    """Return what the ranks will run: the parameters, the Units, the lists of Actions, and the resolved settings."""
    stated = dict(stated_settings(settings))
    for info in plan.registry.of_kind("parameter"):
        stated[f"the parameter {info.name}"] = (
            f"{tuple(info.shape)} {info.dtype}, stages {tuple(info.stages)}"
        )
    for name, each in plan.classes.items():
        for place, (unit, stage) in enumerate(zip(each.units, each.unit_stages, strict=True)):
            where = f"Unit {place} of {name}" if len(plan.classes) > 1 else f"Unit {place}"
            stated[where] = f"{unit.name}, {unit.elements} elements, stage {stage}"
            stated[f"the buffers of {where}"] = "; ".join(
                f"{row.kind} {row.itemsize} {row.tier} {row.form} {dict(row.placement)}"
                for (index, _), rows in each.buffers.items()
                if index == place
                for row in rows
            )
        for place, action in enumerate(each.actions):
            stated[f"Action {place} of {name}"] = str(action)
    return stated


def digest_of(statement: Statement) -> str:
    """Return 128 bits of a statement, as 32 hexadecimal digits."""
    return hashlib.blake2b(json.dumps(statement, sort_keys=True).encode(), digest_size=16).hexdigest()


def differing_settings(world: World, statement: Statement, timeout_s: float) -> str:
    """Return a sentence about the first setting that differs between the ranks, "" if all are alike. Collective."""
    if world.size == 1:
        return ""
    key = f"settings/{world.board.number('settings')}"
    world.post(key, digest_of(statement))
    digests = world.collect(key, timeout_s, "the comparison of the ranks' configurations")
    return "" if len(set(digests)) == 1 else first_difference(world, statement, timeout_s)


def first_difference(world: World, statement: Statement, timeout_s: float) -> str:
    """Return a sentence about the first entry of the statement that differs between the ranks. Collective.

    The sentence contains the entry, its values and the ranks that have each value. It is "" if the ranks agree.
    """
    key = f"statement/{world.board.number('statement')}"
    world.post(key, json.dumps(statement))
    texts = world.collect(key, timeout_s, "the comparison of what the ranks will do")
    every: list[dict[str, str]] = [json.loads(text) for text in texts]
    names = dict.fromkeys(name for each in every for name in each)
    for name in names:
        values: dict[str, list[int]] = {}
        for rank, each in enumerate(every):
            values.setdefault(each.get(name, "absent"), []).append(rank)
        if len(values) > 1:
            said = (f"{_short(value)} on {named_ranks(ranks)}" for value, ranks in values.items())
            return f"{name} is {' and '.join(said)}"
    return ""


def _short(value: str) -> str:
    return value if len(value) <= _SHOWN else f"{value[:_SHOWN]}..."


def _is_per_rank(key: str) -> bool:
    return any(key == own or key.startswith(f"{own}.") for own in PER_RANK)


def _flat(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Policy):
        value = value.model_dump(mode="json")
    if not isinstance(value, dict) or not value:
        yield place, value
        return
    for key, inner in value.items():
        yield from _flat(f"{place}.{key}" if place else str(key), inner)
