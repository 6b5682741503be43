"""``deepspeed.launcher.runner``: DeepSpeed's format of hosts and slots, and the command ``deepspeed``.

    deepspeed --num_gpus 2 train.py --deepspeed_config ds.json        runs shardwise launch --as-deepspeed ...

``main`` starts ``shardwise launch --as-deepspeed`` with the same arguments; that command supports the launcher's
options.
"""

import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from shardwise.base.errors import UsageError

Slots = dict[str, list[int]]
_HOST = re.compile(r"(\S+)\s+slots=(\d{1,6})")


class LauncherError(UsageError, ValueError):
    """An error in the launcher's arguments; also a ValueError, because DeepSpeed raises ValueError."""


def parse_resource_filter(
    host_info: Mapping[str, Sequence[int]], include_str: str = "", exclude_str: str = ""
) -> Slots:
    """Return the slots of each host that remain after a filter of the form ``HOST:0,1@HOST``.

    Args:
        host_info: The slots of each host.
        include_str: The hosts and slots to keep; empty: no filter.
        exclude_str: The hosts and slots to leave out; empty: no filter.

    Raises:
        LauncherError: if both filters are given, a host or slot is unknown, or a filter has another form.
    """
    if include_str and exclude_str:
        raise LauncherError("launcher: include and exclude say one thing; give one of them")
    named: Slots = {}
    for part in filter(None, (include_str or exclude_str).split("@")):
        host, colon, slots = part.partition(":")
        if not re.fullmatch(r"(\d+(,\d+)*)?", slots) or bool(colon) != bool(slots):
            raise LauncherError(f"launcher: {part!r} is no HOST or HOST:SLOT,SLOT")
        if host not in host_info:
            raise LauncherError(f"launcher: there is no host {host!r}; there are {', '.join(host_info)}")
        wanted = [int(slot) for slot in slots.split(",")] if slots else list(host_info[host])
        if unknown := [slot for slot in wanted if slot not in host_info[host]]:
            raise LauncherError(f"launcher: {host} has no slot {unknown[0]}; it has {list(host_info[host])}")
        named[host] = sorted({*named.get(host, []), *wanted})
    if not include_str and not exclude_str:
        return {host: list(slots) for host, slots in host_info.items()}
    found = {
        host: [slot for slot in slots if (slot in named.get(host, ())) == bool(include_str)]
        for host, slots in host_info.items()
    }
    return {host: slots for host, slots in found.items() if slots}


def fetch_hostfile(hostfile_path: str | Path) -> dict[str, int] | None:
    """Return the number of slots of each host in a hostfile; None if there is no such file."""
    path = Path(hostfile_path)
    return _parse_hostfile(path.read_text(encoding="utf-8").splitlines()) if path.is_file() else None


def _parse_hostfile(hostfile_lines: Iterable[str]) -> dict[str, int]:
    """Return the number of slots of each host in lines of the form ``HOST slots=N``.

    Raises:
        LauncherError: if a line has another form, a host is repeated, or there is no host.
    """
    found: dict[str, int] = {}
    for line in (each.strip() for each in hostfile_lines):
        if not line or line.startswith("#"):
            continue
        match = _HOST.match(line)
        if match is None:
            raise LauncherError(f"hostfile: {line!r} is no line of the form HOST slots=N")
        if match[1] in found:
            raise LauncherError(f"hostfile: {match[1]} stands there twice")
        found[match[1]] = int(match[2])
    if not found:
        raise LauncherError("hostfile: it names no host; expected lines of the form HOST slots=N")
    return found


def parse_range_list(text: str) -> list[int]:
    """Return the cores in a list such as ``0,2-4``, which must be in rising order.

    Raises:
        LauncherError: if the text has another form, or the cores are not in rising order.
    """
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first or (found and first <= found[-1]):
            raise LauncherError(f"core list: {text!r}: expected cores in rising order, such as 0,2-4")
        found += range(first, last + 1)
    return found


def main(args: Sequence[str] | None = None) -> None:
    """Run ``shardwise launch --as-deepspeed`` with the arguments.

    Args:
        args: The arguments; None: those of the command line.

    Raises:
        LauncherError: if a filter of slots is given together with a number of hosts or devices.
        SystemExit: with the exit status of the job, if ``args`` is None or the status is not 0.
    """
    given = list(sys.argv[1:] if args is None else args)
    own = given[: next((i for i, word in enumerate(given) if word.endswith(".py")), len(given))]
    filters = {"-i", "--include", "-e", "--exclude"} & {word.partition("=")[0] for word in own}
    counts = {"--num_nodes", "--num_gpus", "--num_accelerators"} & {word.partition("=")[0] for word in own}
    if filters and counts:
        raise LauncherError(
            f"launcher: {min(filters)} says which slots take ranks; leave out {min(counts)} beside it"
        )
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", "launch", "--as-deepspeed", *given], check=False
    )
    if args is None or done.returncode:
        raise SystemExit(done.returncode)
