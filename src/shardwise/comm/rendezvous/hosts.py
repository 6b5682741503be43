"""Hosts: the ranks that share a host, and the two levels in which a group that spans several hosts may exchange.

ranks    0 1 2 3
hosts    0 0 1 1        number of each rank's host
across   (0 2) (1 3)    the ranks in one place of their hosts
within   (0 1) (2 3)    the ranks of one host
"""

from collections.abc import Sequence

Ranks = tuple[int, ...]


def numbered(names: Sequence[str]) -> tuple[int, ...]:
    """Return the number of each rank's host, from the hosts' names."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return tuple(numbers[name] for name in names)


def levels_of(ranks: Ranks, hosts: Sequence[int]) -> tuple[list[Ranks], list[Ranks]] | None:
    """Return the groups ``across`` and ``within`` of a group's ranks.

    Args:
        ranks: Ranks of the group.
        hosts: Number of each rank's host.

    Returns:
        The groups; None unless there are several hosts with equally many ranks, more than one, that are neighbours in
        the group.
    """
    starts = [place for place, host in enumerate(hosts) if not place or host != hosts[place - 1]]
    size = len(ranks) // len(starts)
    within = [ranks[start : start + size] for start in starts]
    if 1 in (len(starts), size) or len(starts) > len({*hosts}) or starts != [*range(0, len(ranks), size)]:
        return None
    return [tuple(column) for column in zip(*within, strict=True)], within
