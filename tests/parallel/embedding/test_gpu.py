"""On an accelerator static tables lie there, dynamic ones on the CPU, and both learn as they do on the CPU."""

import pytest
import torch

from shardwise.base.ragged import Ragged
from shardwise.parallel.embedding.collection import EmbeddingCollection
from tests.parallel.embedding.test_exact import OPTIMIZERS, batch, loss_of, tables


@pytest.mark.gpu
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_learns_as_on_the_cpu(optimizer: str, dynamic: bool) -> None:
    there = torch.device(torch.accelerator.current_accelerator() or "cpu")
    found = {}
    for device in (torch.device("cpu"), there):
        collection = EmbeddingCollection(
            tables("auto", "auto", dynamic, False), OPTIMIZERS[optimizer], dtype=torch.float64
        )
        collection.place(device=device)
        for step in range(4):
            given = {
                name: Ragged(*(None if part is None else part.to(device) for part in ragged))  # type: ignore[arg-type]
                for name, ragged in batch(step).items()
            }
            loss = loss_of(collection(given))
            assert loss.device.type == device.type
            loss.backward()
            collection.step(max_norm=1.0)
        found[device.type] = [collection.rows_here(table.name) for table in collection.tables]
    for ours, theirs in zip(found["cpu"], found[there.type], strict=True):
        assert torch.equal(ours.keys, theirs.keys)
        torch.testing.assert_close(ours.weights, theirs.weights.cpu(), rtol=1e-9, atol=1e-11)
