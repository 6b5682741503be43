"""One rank runs a configuration on made batches, without its data, and writes nothing but its figures."""

import json
from pathlib import Path

import pytest
import torch

from shardwise.base.ragged import Ragged
from shardwise.cli.outlook.measure_rank import filled, main


def test_a_rank_measures_steps_without_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = {
        "model": {"name": "gpt", "layers": 1, "width": 16, "heads": 2, "context": 16, "vocab": 256},
        "data": {"source": "no_such_file.txt"},
        "batch": {"global_size": 4, "micro_size": 2},
        "monitor": {"tensorboard": True},
    }
    job, out = tmp_path / "job.json", tmp_path / "out"
    job.write_text(json.dumps({"config": config, "steps": 2}))
    out.mkdir()
    main([str(job), str(out)])
    figures = json.loads((out / "0.json").read_text())
    assert figures["step_s"] > 0 and figures["peak_bytes"] > 10**7
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.json", "out"]


def test_shapes_are_filled_with_numbers_that_a_model_reads() -> None:
    tokens = torch.empty(4, 8, dtype=torch.int64, device="meta")
    keys = Ragged(torch.zeros(2, dtype=torch.int64), torch.arange(3))
    given = {
        "tokens": tokens,
        "pixels": torch.empty(2, 3, device="meta"),
        "labels": tokens[:, 0],
        "keys": keys,
    }
    found = filled(given, 5, torch.Generator().manual_seed(0))
    assert found["tokens"].shape == (4, 8) and found["tokens"].min() >= 0 and found["tokens"].max() < 5
    assert found["tokens"].unique().numel() > 1
    assert found["pixels"].shape == (2, 3) and found["labels"].tolist() == [0, 0, 0, 0]
    assert found["keys"].values.tolist() == [0, 0]
