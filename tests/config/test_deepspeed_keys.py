"""The table of DeepSpeed's keys against what the package itself reads."""

import re
from pathlib import Path

from shardwise.config.deepspeed_keys import KEYS

NAMES = Path(__file__).parent / "deepspeed_names.txt"
"""What benchmarks/deepspeed/keys.py printed of deepspeed 0.19.8: paths and defaults."""


def test_every_key_that_the_package_reads_has_a_row() -> None:
    """The parameters of a type stand there under the class that has them: ``optimizer.params(FusedAdam).lr``."""
    known = {row.path for row in KEYS}
    named = [line.split("\t")[0] for line in NAMES.read_text().splitlines()]
    assert len(named) > 400
    inner = "tensor_parallel.tensor_parallel."  # another name of tensor_parallel.tp
    missing = [
        path
        for path in named
        if re.sub(r"\(\w+\)", "", path.replace(inner, "tensor_parallel.tp.")) not in known
    ]
    assert not missing


def test_defaults_are_those_of_the_package() -> None:
    rows = {row.path: row for row in KEYS if not row.of and not row.stands_for}
    differ = []
    for line in NAMES.read_text().splitlines():
        path, default = line.split("\t")
        if path in rows and default not in ("None", "'removed'", "auto"):
            ours = rows[path].default
            if isinstance(ours, int | float) and not isinstance(ours, bool):
                is_same = default.replace(",", "") in (str(ours), "sys.maxsize") or float(default) == ours
            else:
                is_same = repr(ours).lower() == default.lower()
            differ += [] if is_same else [(path, default, ours)]
    # 0.19.8 writes these two as objects of its own.
    assert [path for path, *_ in differ] == ["tensor_parallel.dtype", "weight_quantization.q_type"]
