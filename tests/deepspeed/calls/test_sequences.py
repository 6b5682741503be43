"""The loop of DeepSpeed's tutorial for sequences over ranks, against plain torch on the same batches."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise.deepspeed as deepspeed
from shardwise.base.errors import UsageError
from shardwise.comm.world import World
from tests.engine.test_context import SMALL, VOCABULARY

STEPS = 4


def net() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("llama", **SMALL)
    return transformers.AutoModelForCausalLM.from_config(config).double()


def batch(number: int) -> dict[str, Tensor]:
    length = 11 + number
    tokens = torch.randint(VOCABULARY, (1, length), generator=torch.Generator().manual_seed(number))
    labels = tokens.clone()
    labels[:, :3] = -100
    return {"input_ids": tokens, "labels": labels, "position_ids": torch.arange(length)[None]}


CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.5,
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
}


def by_tutorial(world: World) -> tuple[list[float], dict[str, Tensor]]:
    from shardwise.deepspeed.runtime.sequence_parallel.ulysses_sp import (
        UlyssesSPAttentionHF,
        UlyssesSPDataLoaderAdapter,
    )
    from shardwise.deepspeed.utils import groups

    deepspeed.init_distributed()
    model = net()
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model, core_attn_implementation="sdpa", sequence_parallel_size=2, micro_batch_size=1
    )
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=CONFIG, mpu=mpu
    )
    group = groups._get_sequence_parallel_group()
    assert (groups._get_sequence_parallel_world_size(), groups._get_sequence_parallel_rank()) == (
        2,
        world.rank,
    )
    assert engine.train_batch_size() == 1 and engine.sequence_parallel_size == 2
    own = [batch(number) for number in range(world.rank, STEPS, 2)]
    loader = UlyssesSPDataLoaderAdapter(own, world.rank, group, 2, "cpu")
    losses = []
    for each in loader:
        targets = each["shift_labels"]
        output = engine(**each)
        loss = engine.module.loss_function(
            logits=output.logits, labels=None, shift_labels=targets, vocab_size=VOCABULARY
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the tutorial calls what torch deprecates
            parts = torch.distributed.nn.functional.all_gather(loss, group=group)
            counts = torch.distributed.nn.functional.all_gather((targets != -100).sum(), group=group)
        total = sum(part * count for part, count in zip(parts, counts, strict=True))
        loss = total / sum(counts)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert len(losses) == len(loader) == STEPS
    weights = dict(engine.module_state_dict())
    engine.destroy()
    return losses, weights


def by_key(world: World) -> tuple[list[float], dict[str, Tensor]]:
    """The configuration's key, and a loss in the model."""
    model = net()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config={**CONFIG, "sequence_parallel_size": 2}
    )
    for number in range(STEPS):
        each = batch(number)
        del each["position_ids"]
        engine.backward(engine(**each).loss)
        engine.step()
    weights = dict(engine.module_state_dict())
    engine.destroy()
    return [], weights


def in_plain_torch() -> tuple[list[float], dict[str, Tensor]]:
    model, losses = net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(STEPS):
        optimizer.zero_grad()
        loss = model(**batch(number)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.parametrize("run", [by_tutorial, by_key])
def test_a_script_for_sequences_over_ranks(ranks: Any, run: Any) -> None:
    losses, wanted = in_plain_torch()
    for got, weights in ranks(2).run(run):
        assert not got or got == pytest.approx(losses, rel=1e-5)
        for name, value in wanted.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-6)


def test_what_a_script_does_not_need_is_named() -> None:
    from shardwise.deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from shardwise.deepspeed.sequence.layer import DistributedAttention

    assert UlyssesSPAttentionHF.register_with_transformers("model", "sdpa", 1, 1) is None
    with pytest.raises(UsageError, match="replaces the model's attention itself"):
        UlyssesSPAttentionHF(None)
    with pytest.raises(UsageError, match="call the local attention in its place"):
        DistributedAttention(None, None)
