"""Getters of DeepSpeed's engine: each answers with the configuration's number."""

from shardwise.deepspeed.training import getters
from tests.deepspeed.training.script import configuration, made


def test_every_getter_answers() -> None:
    """Each is the value of a key, given or its default."""
    engine, *_ = made(config=configuration(2, zero_optimization={"stage": 2, "reduce_bucket_size": 7}))
    found = {name: getattr(engine, name)() for name in getters.NAMES}
    assert found["zero_reduce_bucket_size"] == 7 and found["zero_allgather_bucket_size"] == 5e8
    assert found["zero_optimization_partition_gradients"] and not found["zero_optimization_partition_weights"]
    assert found["optimizer_params"]["lr"] == 0.01 and found["scheduler_name"] == "WarmupLR"
    assert found["zero_offload_optimizer"] is None and found["dynamic_loss_scale"] is True
    assert engine.dynamic_loss_scale_args()["init_scale"] == 2**16 and not found["is_compiled"]
    assert engine._config.zero_config.stage == engine._config.zero_optimization_stage == 2
    engine.destroy()
