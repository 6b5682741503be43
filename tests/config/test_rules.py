"""Rules across policies: what excludes what."""

from typing import Any

import pytest

from shardwise.base.errors import ConfigError
from shardwise.config.rules import check
from shardwise.config.run import load


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"compile": {"cuda_graphs": True}}, "set compile.scope: blocks"),
        (
            {"compile": {"scope": "blocks", "cuda_graphs": True}, "zero": {"stage": 3}},
            "set zero.stage: 2 or less",
        ),
        (
            {
                "compile": {"scope": "blocks", "cuda_graphs": True},
                "offload": {"optimizer": "disk", "parameters": "disk", "disk_path": "/scratch"},
            },
            "offload.parameters: device",
        ),
        ({"compile": {"scope": "blocks", "cuda_graphs": True}, "recompute": "full"}, "and recompute: none"),
    ],
    ids=str,
)
def test_cuda_graphs_are_refused_where_memory_moves(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"compile.cuda_graphs: .*{message}"):
        check(load(given))
