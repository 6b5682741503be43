"""What one commit does in a comparison: steps of each row, taking turns with the other commit's ranks. See run.py.

    turns.py FOLDER NUMBER ROUNDS NAME...       NUMBER: 0 or 1, which of the two; each hands over by files in FOLDER

Between turns a rank sleeps, so the other commit has the machine to itself. Rank 0 prints one line of JSON: seconds of a
step by name and turn.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from step import step_of

from shardwise.comm.world import join

STEPS = 2
"""In a turn, behind one that is not counted."""


def wait_for(path: Path) -> None:
    """Asleep, until somebody has made the file."""
    while not path.exists():
        time.sleep(0.002)


def main() -> None:
    """See the module's docstring."""
    folder, me, rounds, names = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
    world = join(quiet=True)
    steps = {name: step_of(name, world) for name in names}
    for step in steps.values():
        for _ in range(2):
            step()
    seconds: dict[str, list[float]] = {name: [] for name in names}

    def everybody(what: str) -> None:
        for rank in range(world.size):
            wait_for(folder / f"{what}.{rank}")

    (folder / f"ready{me}.{world.rank}").touch()
    everybody("ready0")
    everybody("ready1")
    turn = 0
    for number in range(rounds):
        for name, step in steps.items():
            for who in (0, 1) if number % 2 else (1, 0):
                if who == me:
                    step()
                    begin = time.perf_counter()
                    for _ in range(STEPS):
                        step()
                    seconds[name].append((time.perf_counter() - begin) / STEPS)
                    (folder / f"turn{turn}.{world.rank}").touch()
                everybody(f"turn{turn}")
                turn += 1
    if world.rank == 0:
        print("RESULT " + json.dumps(seconds), flush=True)


if __name__ == "__main__":
    main()
