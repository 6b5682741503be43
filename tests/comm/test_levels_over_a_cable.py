"""Two hosts of two ranks, as network namespaces: the curve of one process, and bytes as the kernel counts them.

``make soak``, as root on Linux.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launch.curves import CURVES, TRAIN, check_curve, curve_alone
from tests.namespaces import NamespaceHost, namespaces


@pytest.fixture
def hosts() -> Iterator[list[NamespaceHost]]:
    with namespaces() as made:
        yield made


def _run(
    hosts: list[NamespaceHost], script: Path, counts: tuple[int, ...], config: dict[str, Any]
) -> list[str]:
    """What the ranks of each host printed."""
    secret = os.environ | {"SHARDWISE_SECRET": "of both hosts"}
    total, first, started = sum(counts), 0, []
    for number, (host, count) in enumerate(zip(hosts, counts, strict=True)):
        ranks = {
            str(local): {
                "RANK": str(first + local),
                "WORLD_SIZE": str(total),
                "LOCAL_RANK": str(local),
                "LOCAL_WORLD_SIZE": str(count),
                "MASTER_ADDR": hosts[0].address,
                "MASTER_PORT": "29617",
                "GLOO_SOCKET_IFNAME": f"cable{number + 1}",
            }
            for local in range(count)
        }
        started += [
            host.start(
                *(sys.executable, str(script), json.dumps(config)),
                env=secret | each,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for each in ranks.values()
        ]
        first += count
    said = [process.communicate(timeout=300)[0] for process in started]
    assert {process.returncode for process in started} == {0}, said
    return said


@pytest.mark.soak
@pytest.mark.parametrize(
    ("counts", "config", "crossing"),
    [
        *(((2, 2), config, crossing) for config, crossing in CURVES.values()),
        ((2, 1), {"zero": {"stage": 0}}, 0.0),
        ((2, 1), {"zero": {"stage": 3}}, 0.0),
    ],
    ids=[*CURVES, "stage 0 on 2 and 1", "stage 3 on 2 and 1"],
)
def test_hosts_of_ranks_train_as_one_process(
    hosts: list[NamespaceHost],
    tmp_path: Path,
    counts: tuple[int, ...],
    config: dict[str, Any],
    crossing: float,
) -> None:
    """Ranges of stage 3 go in one step over hosts with different numbers of ranks."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    texts = _run(hosts, script, counts, config)
    check_curve("".join(texts), curve_alone(script), crossing)
