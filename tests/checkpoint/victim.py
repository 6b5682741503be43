"""A process that saves and is killed. Run as a program: one JSON order a line on stdin, one JSON answer on stdout.

It imports torch once and forks for every order, so that a killing costs milliseconds. The fork is the single-threaded
program's own; ranks are threads of the child and die together.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from tests_checkpoint.crew import TINY, ThreadPeers, crew, items_of, make_state, succeed
from tests_checkpoint.faults import KillingFiles

from shardwise.checkpoint import CheckpointPolicy, Checkpoints


def save_on(order: dict, acknowledge: int) -> None:
    """Save ``steps`` in turn on ``ranks``; after each that is committed, one line."""
    ranks = order["ranks"]
    files = KillingFiles(order["at"], order["torn"], order["only"])

    def work(peers: ThreadPeers) -> None:
        policy = CheckpointPolicy(keep_last=2, timeout_s=30, asynchronous=order["behind"])
        checkpoints = Checkpoints(Path(order["root"]), peers, policy, sizes=TINY, files=files)
        for step in order["steps"]:
            checkpoints.save(step, items_of(make_state(step), peers.rank, ranks, step), {"step": step})
            checkpoints.wait()
            if peers.rank == 0:
                os.write(acknowledge, f"{step} {len(files.calls)}\n".encode())

    succeed(crew(ranks, work))


def execute(order: dict) -> dict:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reading)
            save_on(order, writing)
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    if order["after_s"] is not None:
        time.sleep(order["after_s"])
        os.kill(child, signal.SIGKILL)
    with os.fdopen(reading) as pipe:
        lines = [line.split() for line in pipe if line.endswith("\n")]
    _, status = os.waitpid(child, 0)
    return {
        "killed": os.WIFSIGNALED(status),
        "status": os.waitstatus_to_exitcode(status),
        "steps": [int(step) for step, _ in lines],
        "calls": int(lines[-1][1]) if lines else 0,
    }


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(execute(json.loads(line))), flush=True)
