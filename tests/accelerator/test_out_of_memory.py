"""Memory of a device that ends: the error names the row that outgrew its forecast, by what the allocator has given."""

from typing import Any

import torch
from torch import Tensor, nn

import shardwise
from shardwise.base.errors import OutOfMemoryError
from tests.accelerator.crew import Crew
from tests.accelerator.pretend import Bench, register
from tests.ranks import RankPool

PLENTY = 1 << 16
"""Rows of a batch that the pretended device has no memory for."""


class Net(nn.Module):
    """A model whose last block finds no memory for large batches."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        kept = [x]
        for block in self.blocks:
            kept.append(block(kept[-1]).relu())
        if len(x) >= PLENTY:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 16.00 MiB. GPU 0")
        return kept[-1].square().mean()


def out_of_memory(world: Any, is_measured: bool) -> str:
    small = torch.ones(4, 16)
    outlook = shardwise.foresee(Net, {}, 1, torch.device("cuda"), example=small)
    with Bench():
        engine = shardwise.initialize(Net(), {"batch": {"duplicates": "allow"}}, world=world)
        large = torch.ones(PLENTY, 16)
        engine.expect_bytes(outlook.rows(outlook.steps[0]))
        engine.train_step([small])
        try:
            if is_measured:
                with engine.measure_memory([large]):
                    engine.train_step([large])
            else:
                engine.train_step([large])
        except OutOfMemoryError as error:
            return str(error)
        finally:
            engine.close()
    return ""


def run_all(_: Any) -> list[str]:
    device = register()
    return [text for each in (False, True) for text in Crew(1, device).run(out_of_memory, each)]


def test_the_row_that_outgrew_its_forecast_is_named(device_process: RankPool) -> None:
    [(plain, measured)] = device_process.run(run_all)
    for text, row in ((plain, "kept, received and at work"), (measured, "")):
        [line] = [each for each in text.splitlines() if "outgrew its forecast most: " in each]
        assert line.startswith(f"  outgrew its forecast most: {row}"), text
        held = line.split("held ")[1].split(" with")[0]
        # The batch and four results of 4 MiB each lie on the device, and 16 MiB could not be had.
        assert held.endswith("MiB") and 16 < float(held.split()[0]) < 48, text
