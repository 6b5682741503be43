"""Keys under ``offload:``, and which exclude each other."""

from typing import Any

import pytest
from pydantic import ValidationError

from shardwise.tiers.offload import OffloadPolicy


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"optimizer": "disk"}, "needs offload.disk_path"),
        ({"parameters": "host"}, "parameters: host with optimizer: device; .* set optimizer: host too"),
        ({"optimizer": "disk", "disk_path": "/a", "parameters": "host"}, "set optimizer: host too"),
        ({"step": "delayed"}, "step: delayed without optimizer"),
        (
            {"step": "delayed", "optimizer": "host", "parameters": "host"},
            "step: delayed with parameters: host",
        ),
        ({"step": "delayed", "optimizer": "host", "fraction": 0.5}, "fraction: 0.5"),
        ({"fraction": 0}, "greater than 0"),
        ({"buffers": 0}, "greater than or equal to 1"),
    ],
)
def test_what_is_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        OffloadPolicy(**given)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"optimizer": "host", "parameters": "host", "fraction": 0.5},
        {"optimizer": "host", "parameters": "device", "step": "delayed"},
        {"optimizer": "disk", "disk_path": "/a", "parameters": "disk", "step": "at_end"},
    ],
)
def test_what_goes_together(given: dict[str, Any]) -> None:
    assert OffloadPolicy(**given).model_dump(exclude_unset=True).keys() == given.keys()
