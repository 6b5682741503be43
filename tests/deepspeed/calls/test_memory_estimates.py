"""Estimates of model state: the formulas in GiB."""

import pytest
from torch import nn

from shardwise.deepspeed.calls.memory_estimates import (
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)

GIB = 1 << 30


def rows(capsys: pytest.CaptureFixture[str]) -> dict[str, tuple[float, float]]:
    """Host and device memory in GiB by what lies on the host."""
    found = {}
    for line in capsys.readouterr().out.splitlines()[2:]:
        host, device, where = line.split("|")
        found[where.strip()] = (float(host.split()[0]), float(device.split()[0]))
    return found


def test_stage_2_keeps_weights_and_cuts_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    estimate_zero2_model_states_mem_needs_all_cold(GIB, num_gpus_per_node=2, num_nodes=2)
    assert rows(capsys) == {"optimizer on the host": (6.0, 3.0), "none on the host": (0.0, 6.0)}


def test_stage_3_cuts_all_and_gathers_two_layers(capsys: pytest.CaptureFixture[str]) -> None:
    estimate_zero3_model_states_mem_needs_all_cold(GIB, GIB // 8, num_gpus_per_node=2, num_nodes=2)
    assert rows(capsys) == {
        "optimizer and parameters on the host": (7.0, 1.5),
        "optimizer on the host": (6.0, 2.0),
        "none on the host": (0.0, 5.0),
    }


def test_a_model_is_counted_with_its_largest_layer_and_shared_weights_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = nn.Sequential(nn.Linear(1000, 2000, bias=False), nn.Linear(1000, 1000, bias=False))
    model.append(model[1])
    estimate_zero3_model_states_mem_needs_all_live(model)
    assert "3M parameters, the largest layer 2M, 1 hosts with 1 devices" in capsys.readouterr().out
    estimate_zero2_model_states_mem_needs_all_live(model)
    assert "zero stage 2: 3M parameters" in capsys.readouterr().out
