"""DeepSpeed's facts about its build."""

import torch

from shardwise.deepspeed.calls import version_facts
from shardwise.launch.as_deepspeed import VERSION


def test_the_version_is_that_of_the_package_under_its_name() -> None:
    assert version_facts.version == VERSION


def test_torch_is_told_by_major_and_minor() -> None:
    major, minor = version_facts.torch_info["version"].split(".")
    assert torch.__version__.startswith(f"{major}.{minor}.")
    assert version_facts.compatible_ops.keys() == version_facts.installed_ops.keys()
