"""Tables of hardware are complete and have sources, and a fault in a file is named with its place and unit."""

import copy
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwise.base.errors import ConfigError
from shardwise.base.hardware import Link, Neighbours, Product
from shardwise.base.hardware_files import (
    find_hardware,
    read_hardware,
    shipped_tables,
    write_hardware,
)

OWN: dict[str, Any] = {
    "peaks": {"fp32": "10 TFLOP/s", "fp16": "80 TFLOP/s"},
    "efficiency": {"product": [["1 MFLOP", 0.1], ["1 GFLOP", 0.8]]},
    "memory": {
        "device": {"size": "24 GiB", "rate": "1 TB/s", "reached": 0.5},
        "host": {"rate": "20 GB/s"},
        "disk": {"rate": "2 GB/s"},
    },
    "links": {
        "device": {"rate": "16 GB/s", "latency": "10 us"},
        "host": {"rate": "100 GB/s", "reached": 0.75, "latency": "3 us", "taken": 0.1},
        "cluster": {"rate": "1 GB/s", "latency": "0.05 ms"},
    },
    "operation": "5 us",
}


def written(folder: Path, found: Any) -> Path:
    path = folder / "own.json"
    path.write_text(found if isinstance(found, str) else json.dumps(found))
    return path


def test_shipped_tables_are_whole_and_every_figure_has_a_source() -> None:
    tables = shipped_tables()
    assert {"v100-32gb", "a100-40gb", "a100-80gb", "h100", "h200", "b200", "gb200", "mi300x"} <= set(tables)
    for name, table in tables.items():
        found = table.hardware(name)
        assert set(table.sources) == set(table.figures) and name not in table.sources.values()
        assert found.memory_bytes["device"] > 0 and table.devices
        sizes = [10**power for power in range(3, 15)]
        for kind in ("product", "attention", "convolution"):
            shares = [found.share_of_peak(Product(kind, "fp16", size)) for size in sizes]  # type: ignore[arg-type]
            assert shares == sorted(shares) and 0 < shares[0] <= shares[-1] <= 1
        assert found.links["host"].bytes_s >= 8e9 and found.links["cluster"].bytes_s >= 5e9
        assert all(0 < link.latency_s < 1e-4 and link.taken < 0.5 for link in found.links.values())


def test_devices_are_described_by_one_table_each() -> None:
    for name in (
        "A100-SXM4-80GB",
        "A100-SXM4-40GB",
        "V100-PCIE-16GB",
        "GH200 96GB",
        "H200",
        "H200 NVL",
        "L4",
        "L40",
    ):
        fitting = [
            table
            for table in shipped_tables().values()
            if any(re.fullmatch(each, name) for each in table.devices)
        ]
        assert len(fitting) == 1, name


def test_figures_that_a_later_device_adds_are_not_taken_from_the_one_it_is_like() -> None:
    """A V100 is described as an A100 with other figures; it has no matrix units for bf16."""
    assert set(find_hardware("v100-32gb").peaks) == {"fp64", "fp32", "fp16"}
    assert find_hardware("h200").peaks == find_hardware("h100").peaks
    assert (
        find_hardware("h200").sources["memory.device.rate"]
        != find_hardware("h100").sources["memory.device.rate"]
    )


def test_a_file_of_a_user(tmp_path: Path) -> None:
    found = find_hardware(str(written(tmp_path, OWN)))
    assert found.name == "own" and found.peaks == {"fp32": 10e12, "fp16": 80e12}
    assert found.memory_bytes == {"device": 24 * 2**30} and found.memory_bytes_s["device"] == 0.5e12
    assert found.links["host"] == Link(75e9, 3e-6, 0.1) and found.links["cluster"] == Link(1e9, 5e-5)
    assert found.operation_s == 5e-6 and found.efficiency["attention"] == ((1e6, 0.1), (1e9, 0.8))
    assert set(found.sources.values()) == {str(tmp_path / "own.json")}
    like = {"like": "h100", "links": {"cluster": {"rate": "25 GB/s"}}, "sources": {"links": "a manual"}}
    ours, theirs = read_hardware(written(tmp_path, like)), find_hardware("h100")
    assert ours.links["cluster"].bytes_s == 25e9 * 0.9 and ours.links["host"] == theirs.links["host"]
    assert ours.sources["links.cluster.rate"] == "a manual"
    assert ours.sources["links.cluster.latency"] == theirs.sources["links.cluster.latency"]


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    for name in ("a100-80gb", "mi300x", "v100-32gb"):
        given = find_hardware(name)
        write_hardware(tmp_path / f"{name}.json", given)
        found = read_hardware(tmp_path / f"{name}.json")
        assert found.peaks == given.peaks and found.memory_bytes == given.memory_bytes
        assert found.efficiency == given.efficiency
        for level, link in given.links.items():
            assert found.links[level][:3] == pytest.approx(link[:3], rel=1e-8)
            assert found.links[level].groups == link.groups
        assert found.memory_bytes_s == pytest.approx(given.memory_bytes_s, rel=1e-8)
        kept = {place: text for place, text in given.sources.items() if not place.endswith(".reached")}
        assert dict(found.sources) == kept


def test_rates_of_a_calibration_are_written_and_read_again(tmp_path: Path) -> None:
    given = replace(
        find_hardware("l4"),
        operations={"copy": ((1e6, 5e9), (1e8, 3e9)), "update": ((1e6, 2e10),)},
        neighbours=Neighbours(((2e-3, 0.07), (0.128, 0.05)), ((1.0, 0.95), (2.0, 1.125))),
        ending_action_s=2.5e-4,
        exchanges={"send": ((2048.0, 1e-4),), "gloo send": ((2048.0, 5e-4),)},
        efficiency={**find_hardware("l4").efficiency, "batched": ((1e6, 0.25),)},
    )
    write_hardware(tmp_path / "l4.json", given)
    found = read_hardware(tmp_path / "l4.json")
    assert found.operations == given.operations and found.neighbours == given.neighbours
    assert find_hardware("l4").neighbours == ((), ())
    assert found.ending_action_s == 2.5e-4 and found.exchanges == given.exchanges
    assert found.efficiency["batched"] == ((1e6, 0.25),)


FAULTS: list[tuple[str, Any, str]] = [
    ("links.host.rate", "100 GB", r"links.host.rate: '100 GB' is not in B/s; .* such as '25 GB/s'"),
    ("links.host.rate", 100, r"links.host.rate: 100 is not in B/s"),
    ("links.host.rate", "0 GB/s", r"links.host.rate: '0 GB/s' is zero"),
    ("links.host.rate", "-1 GB/s", r"links.host.rate: '-1 GB/s' is not in B/s"),
    ("links.host.rate", "1e400 GB/s", r"links.host.rate: '1e400 GB/s' is not in B/s"),
    ("links.host.latency", "3 seconds", r"links.host.latency: '3 seconds' is not in s; .* such as '5 us'"),
    ("links.host.reached", 1.5, r"links.host.reached: 1.5 is no share"),
    ("links.host.reached", True, r"links.host.reached: True is no share"),
    (
        "links.host.groups",
        [[2]],
        r"links.host.groups: \[\[2\]\] is no table of groups; expected pairs of ranks",
    ),
    ("links.host.groups", [[4, 0.5], [2, 0.2]], r"is no table of groups"),
    ("links.host.groups", [[2, 1.5]], r"links.host.groups: 1.5 is no share"),
    (
        "passes",
        [[1, 1.1], [1, 1.2]],
        r"passes: .* is no table of factors; expected pairs of ranks, ascending",
    ),
    ("passes", [[1, 0]], r"passes: \[\[1, 0\]\] is no table of factors"),
    ("passes", [], r"passes: \[\] is no table of factors"),
    ("unevenness", [["10 ms", 2]], r"unevenness: 2 is no share"),
    ("operations", {"copy": [["1 MB", "5 GB"]]}, r"operations.copy: '5 GB' is not in B/s"),
    (
        "operations",
        {"sort": []},
        r"unknown key 'operations.sort'; known here: arithmetic, copy, function, page, update",
    ),
    ("links.rack", {}, r"unknown key 'links.rack'; known here: cluster, device, host"),
    ("memory.device.rates", "1 GB/s", r"unknown key 'memory.device.rates'; did you mean 'rate'"),
    ("memory.device", "24 GB", r"memory.device: expected an object with size, rate, reached"),
    ("peaks.bf61", "1 TFLOP/s", r"unknown key 'peaks.bf61'; did you mean 'bf16'"),
    (
        "efficiency.product",
        [["1 GFLOP", 0.5], ["1 GFLOP", 0.6]],
        r"efficiency.product: the FLOP of the rows do not ascend",
    ),
    ("efficiency.product", [["1 GFLOP/s", 0.5]], r"efficiency.product: '1 GFLOP/s' is not in FLOP;"),
    ("efficiency.product", [], r"efficiency.product: \[\] is no table"),
    (
        "exchanges",
        {"all_gather": [["1 MB", "1 GB/s"]]},
        r"exchanges.all_gather: '1 GB/s' is not in s; .* '5 us'",
    ),
    ("spread", {"compute": [1.1, 1.2]}, r"spread.compute: \[1.1, 1.2\] is no range of factors"),
    ("exchanges", {"gather": []}, r"unknown key 'exchanges.gather'; did you mean 'all_gather'"),
    ("sources", {"links.rack": "x"}, r"sources: no figure lies at 'links.rack'"),
    ("sources", ["x"], r"sources: expected an object of texts"),
    ("devices", ["("], r"devices: \['\('\] is no list of regular expressions"),
    ("like", "h1000", r"like: no table is named 'h1000'; did you mean 'h100'"),
    ("links.cluster.latency", None, r"links.cluster.latency is missing"),
    ("peaks", None, r"peaks is missing"),
]


@pytest.mark.parametrize(
    ("place", "value", "words"), FAULTS, ids=[f"{row[0]}={row[1]!r:.24}" for row in FAULTS]
)
def test_a_fault_is_named_with_its_place(place: str, value: Any, words: str, tmp_path: Path) -> None:
    found = copy.deepcopy(OWN)
    *above, last = place.split(".")
    inner = found
    for key in above:
        inner = inner[key]
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    with pytest.raises(ConfigError, match=words) as caught:
        read_hardware(written(tmp_path, found))
    assert str(caught.value).startswith(f"hardware file {tmp_path / 'own.json'}: ")


def test_names_and_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match="device: no hardware is named 'a100-80g', and there is no file a100-80g; did you mean 'a100-80gb'",
    ):
        find_hardware("a100-80g")
    with pytest.raises(ConfigError, match="hardware file none.json: .*No such file"):
        find_hardware("none.json")
    with pytest.raises(ConfigError, match="not the JSON"):
        read_hardware(written(tmp_path, "{'peaks': 1}"))
    with pytest.raises(ConfigError, match="key 'rows' stands twice"):
        read_hardware(written(tmp_path, '{"rows": "1 GB/s", "rows": "2 GB/s"}'))
