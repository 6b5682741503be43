"""DeepSpeed's loader."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from shardwise import deepspeed


@pytest.mark.parametrize(("drops", "sizes"), [(False, [4, 4, 2]), (True, [4, 4])])
def test_the_last_batch_is_kept_or_left_out(drops: bool, sizes: list[int]) -> None:
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "dataloader_drop_last": drops,
    }
    data = TensorDataset(torch.zeros(10, 2), torch.zeros(10))
    engine, _, _, _ = deepspeed.initialize(model=nn.Linear(2, 1), config=config)
    loader = engine.deepspeed_io(data, num_local_io_workers=0)
    assert [len(batch[0]) for batch in loader] == sizes and len(loader) == len(sizes)
    engine.destroy()
