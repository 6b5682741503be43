"""Factors that were applied to a table are found again from the steps that it then foresees."""

import json
import math
from pathlib import Path

import pytest

from shardwise.base.errors import ConfigError
from shardwise.base.hardware import Hardware, Product
from shardwise.base.hardware_files import find_hardware, read_hardware, write_hardware
from shardwise.simulate.refit import StepLine, read_lines, refit, scaled

TABLE = find_hardware("a100-80gb")


def price(line: StepLine, hardware: Hardware) -> float:
    """A step whose parts depend on the ranks in ways of their own: products, memory, within and between hosts."""
    ranks = line.ranks
    products = hardware.product_s(Product("product", "bf16", 10**10), calls=100_000 // ranks)
    memory = hardware.touched_s(5e11)
    within = 2e9 * min(ranks, line.per_host) / hardware.links["host"].bytes_s
    between = 1e8 * (ranks // line.per_host) / hardware.links["cluster"].bytes_s
    return products + memory + within + between


def lines(truth: Hardware, noise: float = 0.0, hosts: tuple[int, ...] = (1, 2, 4, 8, 16)) -> list[StepLine]:
    found = []
    for place, number in enumerate(hosts):
        for per_host in (2, 4, 8):
            line = StepLine(
                config="gpt.yaml", ranks=number * per_host, device="a100-80gb", per_host=per_host, step_s=1.0
            )
            off = 1 + noise * math.sin(7 * place + per_host)
            found.append(line.model_copy(update={"step_s": price(line, truth) * off}))
    return found


@pytest.mark.parametrize(
    "factors",
    [
        {"product": 0.7, "memory": 0.5, "host": 0.4, "cluster": 1.6},
        {"product": 1.1, "memory": 1.0, "host": 2.5, "cluster": 0.2},
    ],
    ids=str,
)
def test_factors_are_found_again(factors: dict[str, float]) -> None:
    found = refit(lines(scaled(TABLE, factors)), TABLE, price)
    assert found.factors == pytest.approx(factors, rel=0.01)
    assert max(abs(math.log(each)) for each in found.after) < 0.002
    assert max(abs(math.log(each)) for each in found.before) > 0.05


def test_noise_moves_the_factors_little() -> None:
    factors = {"product": 0.7, "memory": 0.8, "host": 0.5, "cluster": 0.5}
    found = refit(lines(scaled(TABLE, factors), noise=0.02), TABLE, price)
    assert found.factors["product"] == pytest.approx(0.7, rel=0.1)
    assert (
        sum(math.log(each) ** 2 for each in found.after)
        < sum(math.log(each) ** 2 for each in found.before) / 20
    )


def test_a_factor_that_no_step_depends_on_stays() -> None:
    """Two lines of one host say nothing about the network."""

    def without_network(line: StepLine, hardware: Hardware) -> float:
        return price(line.model_copy(update={"per_host": 1 << 20}), hardware)

    given = [
        line.model_copy(update={"step_s": without_network(line, scaled(TABLE, {"product": 0.5}))})
        for line in lines(TABLE, hosts=(1,))
    ]
    found = refit(given, TABLE, without_network)
    assert (
        found.factors["cluster"] == pytest.approx(1.0) and max(found.after) < 1.01 and min(found.after) > 0.99
    )


def test_two_lines_move_no_factor_far() -> None:
    """Two lines say little about four factors; of those that explain them, the ones nearest to 1 are taken.

    With a weak pull the rate between hosts, on which these two lines hardly depend, became 0.06 of the table's, and
    other steps were foreseen 2.9 times too long.
    """
    truth = scaled(TABLE, {"product": 0.9, "memory": 0.85, "host": 1.1, "cluster": 0.95})
    every = lines(truth, noise=0.02)
    found = refit([every[1], every[3]], TABLE, price)
    assert all(0.8 < factor < 1.2 for factor in found.factors.values())
    assert max(abs(math.log(price(line, found.hardware) / line.step_s)) for line in every) < 0.1


def test_shares_do_not_exceed_the_peak(tmp_path: Path) -> None:
    found = refit(lines(scaled(TABLE, {"product": 5.0, "memory": 2.0})), TABLE, price)
    assert max(share for _, share in found.hardware.efficiency["product"]) <= 1.0
    write_hardware(tmp_path / "ours.json", found.hardware)
    again = read_hardware(tmp_path / "ours.json")
    assert "refitted to 15 measured steps, times 2" in again.sources["memory.device.rate"]
    assert again.sources["peaks.bf16"] == TABLE.sources["peaks.bf16"]


def test_lines_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    row = {"config": "gpt.yaml", "ranks": 8, "device": "h100", "per_host": 8, "step_s": 0.5}
    path.write_text(f"{json.dumps(row)}\n\n{json.dumps({**row, 'step_s': 0.25})}\n")
    found = read_lines(path)
    assert [line.step_s for line in found] == [0.5, 0.25]
    with pytest.raises(
        ConfigError, match="refit: no line was measured on 'a100-80gb'; devices of the lines: h100"
    ):
        refit(found, TABLE, price)
    path.write_text(f"{json.dumps(row)}\n{json.dumps({**row, 'ranks': 0})}\n")
    with pytest.raises(ConfigError, match="line 2: ranks: Input should be greater than or equal to 1"):
        read_lines(path)
    path.write_text(f"{json.dumps(row)[:-1]}\n")
    with pytest.raises(ConfigError, match="line 1: not the JSON"):
        read_lines(path)
    with pytest.raises(ConfigError, match="expected lines of measured steps"):
        read_lines(tmp_path / "none")
