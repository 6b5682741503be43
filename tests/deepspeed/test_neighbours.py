"""What programs around DeepSpeed do at stage 3: generate by parts, read parameters' attributes, take hooks away."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise.deepspeed as deepspeed
from shardwise.base.errors import UsageError
from shardwise.comm.world import World
from tests import forked
from tests.ranks import RankPool

SGD = {"type": "SGD", "params": {"lr": 0.1}}


def keys(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0,
        "optimizer": SGD,
        "zero_optimization": {"stage": stage},
        **more,
    }


def translator(kind: str) -> nn.Module:
    """A tiny encoder-decoder model whose halves share an embedding."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 24, "d_model": 8, "decoder_start_token_id": 0, "pad_token_id": 0}
    if kind == "t5":
        config = transformers.T5Config(**sizes, d_kv=4, d_ff=16, num_layers=2, num_heads=2, dropout_rate=0.0)
        made: nn.Module = transformers.T5ForConditionalGeneration(config)
    else:
        layers = {
            f"{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")
        }
        wide = {f"{side}_ffn_dim": 16 for side in ("encoder", "decoder")}
        config = transformers.BartConfig(**sizes, **layers, **wide, dropout=0.0, max_position_embeddings=32)
        config.bos_token_id = config.eos_token_id = config.forced_eos_token_id = 1
        made = transformers.BartForConditionalGeneration(config)
    return made.double()


def words(rank: int) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(rank)
    tokens, labels = (torch.randint(2, 24, (2, 5), generator=drawn) for _ in range(2))
    return {"input_ids": tokens, "labels": labels}


def translated(world: World, kind: str) -> list[Any]:
    """Tokens before and after a step, made by ``generate`` of the model itself, which calls the encoder alone."""
    engine, *_ = deepspeed.initialize(model=translator(kind), config=keys(3))
    found: list[Any] = []
    for _ in range(2):
        tokens = words(world.rank)["input_ids"]
        found.append(engine.module.generate(tokens, max_new_tokens=6, do_sample=False).tolist())
        loss = engine(**words(world.rank)).loss
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    with torch.no_grad(), deepspeed.zero.GatheredParameters(engine.module.parameters()):
        found.append(engine.module.get_encoder()(input_ids=tokens).last_hidden_state.sum().item())
    with pytest.raises(
        UsageError, match="is released now"
    ):  # with gradients there is no backward window for it
        engine.module.get_encoder()(input_ids=tokens)
    engine.destroy()
    return found


def translated_plainly(kind: str) -> list[list[Any]]:
    model = translator(kind)
    found: list[list[Any]] = [[], []]
    for _ in range(2):
        model.zero_grad()
        for rank in range(2):
            tokens = words(rank)["input_ids"]
            found[rank].append(model.generate(tokens, max_new_tokens=6, do_sample=False).tolist())  # type: ignore[operator]
            loss = model(**words(rank)).loss
            (loss / 2).backward()
            found[rank].append(loss.item())
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
    for rank in range(2):
        with torch.no_grad():
            hidden = model.get_encoder()(input_ids=words(rank)["input_ids"])  # type: ignore[operator]
            found[rank].append(hidden.last_hidden_state.sum().item())
    return found


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_an_encoder_is_called_by_itself(ranks: Callable[[int], RankPool], kind: str) -> None:
    """The embedding that both halves share lies in the root's Unit, which its own forward alone used to gather."""
    for found, plain in zip(ranks(2).run(translated, kind), translated_plainly(kind), strict=True):
        torch.testing.assert_close(found, plain, rtol=1e-9, atol=1e-12)


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def attributes(world: World) -> list[Any]:
    model = net()
    model[0].bias.requires_grad_(False)
    values = [p.detach().clone() for p in model.parameters()]
    engine, optimizer, *_ = deepspeed.initialize(model=model, config=keys(3))
    from shardwise.deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
    from shardwise.deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    parameters = list(engine.parameters())
    assert [p.ds_id for p in parameters] == [0, 1, 2, 3] and all(
        isinstance(p, nn.Parameter) for p in parameters
    )
    assert [tuple(p.ds_shape) for p in parameters] == [tuple(v.shape) for v in values]
    assert [p.ds_numel for p in parameters] == [24, 6, 12, 2] and not parameters[0].ds_persist
    away, here = ZeroParamStatus.NOT_AVAILABLE, ZeroParamStatus.AVAILABLE
    fetch = [p for p in parameters if hasattr(p, "ds_id") and p.ds_status == away]
    assert len(fetch) == 4
    with deepspeed.zero.GatheredParameters(fetch):
        assert [p.ds_status for p in parameters] == [here] * 4
        torch.testing.assert_close([p.detach().clone() for p in parameters], values)
    assert parameters[0].ds_status == away and parameters[0].ds_summary()["status"] == "NOT_AVAILABLE"
    assert deepspeed.utils.safe_get_full_fp32_param(model[0].bias) is None, "a frozen parameter"
    assert deepspeed.utils.safe_get_local_fp32_param(model[0].bias) is None
    assert deepspeed.utils.safe_get_full_fp32_param(model[0].weight) is not None
    assert isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3) and optimizer.get_lr() == 0.1
    optimizer.set_lr(0.25)
    assert engine.get_lr() == [0.25]
    # What TRL does around a generation.
    offload = optimizer.parameter_offload
    with deepspeed.zero.GatheredParameters(engine.parameters()), torch.no_grad():
        for _, parameter in [
            *offload.module.named_parameters(recurse=True),
            *offload.module.ds_external_parameters(),
        ]:
            parameter.ds_active_sub_modules.clear()
        for hook in [*offload.forward_hooks, *offload.backward_hooks]:
            hook.remove()
        offload.forward_hooks, offload.backward_hooks = [], []
        inside = engine.module(torch.ones(1, 4))
        offload._register_deepspeed_module(offload.module)
    with torch.no_grad():
        torch.testing.assert_close(engine(torch.ones(1, 4)), inside)
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
    own = [p.ds_tensor for p in parameters]
    engine.destroy()
    assert [type(p) for p in model.parameters()] == [nn.Parameter] * 4 and not hasattr(
        model[0].weight, "ds_id"
    )
    return [own, [p.detach() for p in model.parameters()]]


def test_parameters_have_the_attributes_of_deepspeed(ranks: Callable[[int], RankPool]) -> None:
    (first, weights), (second, _) = ranks(2).run(attributes)
    for one, other, weight in zip(first, second, weights, strict=True):
        assert torch.equal(torch.cat([one, other]), weight.flatten())


class Megatron:
    """An object with the groups of model-parallel ranks, as Megatron has it."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size

    def get_model_parallel_world_size(self) -> int:
        return self.size

    def get_model_parallel_rank(self) -> int:
        return self.rank


def beside_an_mpu(world: World) -> str:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2)
    cut = keys(0, tensor_parallel={"autotp_size": 2})
    model = transformers.LlamaForCausalLM(config)
    engine, *_ = deepspeed.initialize(model=model, config=cut, mpu=Megatron(world.rank, 2))
    assert engine.mp_world_size == 2
    engine.destroy()
    with pytest.raises(UsageError, match="an mpu with 2 model-parallel ranks beside autotp_size 1"):
        deepspeed.initialize(model=model, config=keys(0), mpu=Megatron(world.rank, 2))
    with pytest.raises(UsageError, match="follow one another") as refused:
        deepspeed.initialize(
            model=transformers.LlamaForCausalLM(config), config=cut, mpu=Megatron(1 - world.rank, 2)
        )
    return str(refused.value)


def test_an_mpu_that_says_what_the_configuration_says(ranks: Callable[[int], RankPool]) -> None:
    assert all("leave mpu out" in told for told in ranks(2).run(beside_an_mpu))


def test_a_folder_of_checkpoints_has_its_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    engine, *_ = deepspeed.initialize(model=model, config=keys(2))
    engine.save_checkpoint(tmp_path)
    engine.destroy()
    monkeypatch.chdir(tmp_path)
    run = 'import runpy, sys; sys.argv = ["zero_to_fp32.py", ".", "out", "--safe_serialization"]'
    run += '; runpy.run_path("zero_to_fp32.py", run_name="__main__")'
    assert forked.script(run, tmp_path / "said") == 0, (tmp_path / "said").read_text()
    from safetensors.torch import load_file

    torch.testing.assert_close(load_file(tmp_path / "out" / "model.safetensors"), dict(model.state_dict()))


def test_the_state_is_dumped(caplog: pytest.LogCaptureFixture) -> None:
    engine, *_ = deepspeed.initialize(model=net(), config=keys(1, dump_state=True))
    engine.destroy()
    assert "dump_state: " in caplog.text and "zero_optimization.stage: 1" in caplog.text


def test_the_optimizer_is_an_instance_of_its_rule() -> None:
    from shardwise.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from shardwise.deepspeed.ops.lamb import FusedLamb
    from shardwise.deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
    from shardwise.deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    adam = {"type": "Adam", "params": {"lr": 0.1}}
    engine, optimizer, *_ = deepspeed.initialize(model=net(), config=keys(0, optimizer=adam))
    assert isinstance(optimizer, FusedAdam) and isinstance(optimizer, DeepSpeedCPUAdam)
    assert isinstance(optimizer, deepspeed.DeepSpeedOptimizer) and not isinstance(optimizer, FusedLamb)
    engine.destroy()
    model = net()
    mine = torch.optim.AdamW(model.parameters())
    engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=mine, config=keys(0, optimizer=None))
    assert optimizer == mine and isinstance(optimizer, torch.optim.AdamW)
    assert not isinstance(optimizer, torch.optim.SGD) and len({optimizer: 1, mine: 2}) == 2
    engine.destroy()
    for more, kind in (({"fp16": {"enabled": True}}, FP16_Optimizer), ({}, DeepSpeedZeroOptimizer)):
        engine, optimizer, *_ = deepspeed.initialize(model=net(), config=keys(0 if more else 1, **more))
        assert isinstance(optimizer, kind) and not isinstance(optimizer, torch.optim.SGD)
        engine.destroy()


def test_a_scheduler_of_another_optimizer() -> None:
    """Its rates would reach no group."""
    model = net()
    other = torch.optim.SGD(net().parameters(), lr=0.5)
    rates = torch.optim.lr_scheduler.StepLR(other, 1)
    with pytest.raises(AssertionError, match="StepLR, sets the rates of another optimizer"):
        deepspeed.initialize(model=model, config=keys(0), lr_scheduler=rates)
