"""DeepSpeed configurations of the forms that public repositories have: taken, or refused by the name of a feature.

The dictionaries hold the same keys as the files of those projects, in our own words. None may be refused for a comment,
for a bound, or for a key that changes no number.
"""

from typing import Any

import pytest

from shardwise.base.errors import ConfigError
from shardwise.config.auto import resolve
from shardwise.config.deepspeed import translate
from shardwise.config.run import RunConfig

BATCH = dict.fromkeys(
    (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
    ),
    "auto",
)
SCALE = {
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
HALVES = {"fp16": {"enabled": "auto", **SCALE}, "bf16": {"enabled": "auto"}}
ADAM_AUTO = {
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {
        "type": "WarmupLR",
        "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto"),
    },
}
TWO = {
    "stage": 2,
    "allgather_partitions": True,
    "allgather_bucket_size": 5e8,
    "overlap_comm": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 5e8,
    "contiguous_gradients": True,
}
THREE = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
CPU = {"device": "cpu", "pin_memory": True}
BERT = {"type": "Adam", "params": {"lr": 3e-5, "weight_decay": 0.0, "bias_correction": False}}
RECOMPUTE_OFF = {
    "partition_activations": False,
    "cpu_checkpointing": False,
    "contiguous_memory_optimization": False,
    "number_checkpoints": False,
    "synchronize_checkpoint_boundary": False,
    "profile": True,
}
TAKEN: dict[str, dict[str, Any]] = {
    "fine-tuning, stage 0": {
        **BATCH,
        "zero_allow_untested_optimizer": True,
        **HALVES,
        "zero_optimization": {**TWO, "stage": 0},
    },
    "fine-tuning, stage 2": {
        **BATCH,
        "zero_allow_untested_optimizer": True,
        **HALVES,
        "zero_optimization": {**TWO, "round_robin_gradients": True},
    },
    "fine-tuning, stage 2, offload": {
        **BATCH,
        **HALVES,
        "zero_optimization": {**TWO, "offload_optimizer": CPU},
    },
    "fine-tuning, tensor parallel, a comment": {
        "_comment": "models: see the tutorial",
        **BATCH,
        **HALVES,
        "zero_optimization": TWO,
        "tensor_parallel": {"autotp_size": 2},
    },
    "fine-tuning, stage 3": {**BATCH, **HALVES, "zero_optimization": THREE},
    "fine-tuning, stage 3, offload": {
        **BATCH,
        **HALVES,
        "zero_optimization": {**THREE, "offload_optimizer": CPU, "offload_param": CPU},
    },
    "fine-tuning, stage 3, one block offloaded": {
        **BATCH,
        "zero_force_ds_cpu_optimizer": True,
        **HALVES,
        "zero_optimization": {**THREE, "offload_optimizer": {"device": "cpu", "pin_memory": False}},
    },
    "fine-tuning, keys that nobody reads": {
        **BATCH,
        **ADAM_AUTO,
        "zero_optimization": THREE,
        "comms_logger": {"enabled": False},
        "comms_config": {"verbose": False},
        "monitor_config": {"enabled": True, "csv_monitor": {"enabled": False}},
        "steps_per_print": 10,
    },
    "fine-tuning, a loss scale under bf16": {
        **BATCH,
        "bf16": {"enabled": True, "auto_cast": False, **SCALE},
        "zero_optimization": THREE,
    },
    "fine-tuning, recomputation": {
        **BATCH,
        "bf16": {"enabled": True},
        "activation_checkpointing": {"partition_activations": True, "contiguous_memory_optimization": True},
        "zero_optimization": {**THREE, "stage3_module_granularity_threshold": 16},
    },
    "trainer of yaml recipes, torch.compile": {
        **BATCH,
        **HALVES,
        "compile": {"disable": False, "backend": "inductor"},
        "zero_optimization": {"stage": 1, "overlap_comm": True},
    },
    "trainer of yaml recipes, stage 3": {
        **BATCH,
        "bf16": {"enabled": True},
        "fp16": {"enabled": "auto", "auto_cast": False, **SCALE, "initial_scale_power": 32},
        "zero_optimization": {**THREE, "sub_group_size": 0},
        "wall_clock_breakdown": False,
    },
    "trainer of yaml recipes, all on the host": {
        **BATCH,
        "bf16": {"enabled": True},
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {**THREE, "offload_optimizer": CPU, "offload_param": CPU},
    },
    "test of the trainer's library": {
        **BATCH,
        **HALVES,
        **ADAM_AUTO,
        "zero_optimization": {**THREE, "reduce_bucket_size": 0, "stage3_prefetch_bucket_size": 0},
        "steps_per_print": 2000,
    },
    "test of the accelerating library": {
        **BATCH,
        **HALVES,
        **ADAM_AUTO,
        "zero_optimization": {**TWO, "offload_optimizer": {"device": "none"}},
        "steps_per_print": float("inf"),
    },
    "reinforcement learning, secondary partition": {
        "steps_per_print": 100,
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "none"},
            "offload_optimizer": {"device": "none", "pin_memory": True},
            "sub_group_size": "auto",
            "reduce_bucket_size": "auto",
            "zero_hpz_partition_size": 8,
            "zero_quantized_weights": False,
            "zero_quantized_gradients": False,
        },
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
        "data_types": {"grad_accum_dtype": "fp32"},
        "train_micro_batch_size_per_gpu": 1,
        "train_batch_size": 8,
    },
    "reinforcement learning, keys with dots": {
        **BATCH,
        "zero_optimization": THREE,
        "zero_optimization.reduce_bucket_size": 1024,
        "zero_optimization.stage3_param_persistence_threshold": 320,
        "zero_optimization.stage3_prefetch_bucket_size": 921.6,
    },
    "a chat example": {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 10,
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "none"},
            "offload_optimizer": {"device": "none"},
            "stage3_param_persistence_threshold": 1e4,
            "stage3_max_live_parameters": 3e7,
            "stage3_prefetch_bucket_size": 3e7,
            "memory_efficient_linear": False,
        },
        "fp16": {"enabled": True, "loss_scale_window": 100},
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
        "hybrid_engine": {"enabled": False, "max_out_tokens": 512, "inference_tp_size": 1},
        "tensorboard": {"enabled": False, "output_path": "out/", "job_name": "step1"},
    },
    "pictures, half precision": {
        "train_batch_size": 256,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 50,
        "optimizer": {
            "type": "Adam",
            "params": {"lr": 1e-3, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
        },
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "fp16": {"enabled": True, "auto_cast": True},
        "gradient_clipping": 0,
        "prescale_gradients": False,
        "cuda_visible_devices": 0,
    },
    "small pictures": {
        "train_batch_size": 16,
        "steps_per_print": 2000,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.8, 0.999]}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 1000},
        },
        "fp16": {"enabled": False, "fp16_master_weights_and_grads": False, **SCALE},
        "zero_optimization": {**TWO, "cpu_offload": False},
    },
    "BERT on answers": {
        "train_batch_size": 24,
        "train_micro_batch_size_per_gpu": 3,
        "steps_per_print": 10,
        "optimizer": BERT,
        "gradient_clipping": 1.0,
        "fp16": {"enabled": True},
    },
    "BERT, pretrained with Lamb": {
        "train_batch_size": 65536,
        "train_micro_batch_size_per_gpu": 64,
        "prescale_gradients": False,
        "optimizer": {
            "type": "Lamb",
            "params": {
                "lr": 11e-3,
                "weight_decay": 0.01,
                "bias_correction": False,
                "max_coeff": 0.3,
                "min_coeff": 0.01,
            },
        },
        "gradient_clipping": 1.0,
        "wall_clock_breakdown": False,
        "fp16": {"enabled": True, "loss_scale": 0},
    },
    "adapters, all on the host": {
        "fp16": {"enabled": True, **SCALE},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
        "zero_optimization": {**THREE, "overlap_comm": False, "offload_optimizer": CPU, "offload_param": CPU},
        "activation_checkpointing": RECOMPUTE_OFF,
        "train_micro_batch_size_per_gpu": 8,
    },
    "a large GPT, stage 3": {
        "train_batch_size": 64,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {**THREE, "reduce_bucket_size": 1e7, "stage3_prefetch_bucket_size": 1e7},
        "fp16": {"enabled": True},
        "wall_clock_breakdown": True,
        "zero_allow_untested_optimizer": False,
    },
    "a large GPT, stage 1 with bf16 gradients": {
        "train_batch_size": 512,
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 1,
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "bf16",
        "wall_clock_breakdown": True,
    },
    "masters in bf16, autocast": {
        "train_batch_size": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
        "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
        "zero_optimization": {"stage": 3},
    },
    "masters in fp32, autocast": {
        "train_batch_size": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "bf16": {"enabled": True},
        "torch_autocast": {"enabled": True},
        "zero_optimization": {"stage": 3},
    },
    "translation of protein": {
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "torch_adam": True}},
        "fp16": {"enabled": True},
        "activation_checkpointing": {**RECOMPUTE_OFF, "number_checkpoints": None},
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {**TWO, "offload_optimizer": CPU},
    },
    "vision and language, comments everywhere": {
        "__note__": [1, 2],
        **BATCH,
        **HALVES,
        "zero_optimization": {**THREE, "_why": "memory", "offload_param": {"device": "none", "_c": {}}},
    },
    "a sweep of adapters": {
        **BATCH,
        "bf16": {"enabled": True},
        "zero_optimization": {**THREE, "stage3_param_persistence_threshold": 5e5},
        "flops_profiler": {
            "enabled": False,
            "profile_step": 1,
            "module_depth": -1,
            "top_modules": 1,
            "detailed": True,
            "output_file": None,
        },
    },
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "1-bit Adam": (
        {
            "optimizer": {
                "type": "OnebitAdam",
                "params": {
                    "lr": 3e-5,
                    "freeze_step": 400,
                    "weight_decay": 0.0,
                    "bias_correction": False,
                    "cuda_aware": True,
                    "comm_backend_name": "mpi",
                },
            }
        },
        "^config: optimizer.type",
    ),
    "autotuning": ({"autotuning": {"enabled": True, "fast": True, "mp_size": 1}}, "autotuning: "),
    "quantised gradients": (
        {"zero_optimization": {**THREE, "zero_quantized_gradients": True}},
        "zero_quantized_gradients: true",
    ),
    "8 bits": ({"fp8": {"enabled": True}}, "fp8: "),
    "a cut sequence": ({"sequence_parallel": {"enabled": True, "size": 4}}, "sequence_parallel: "),
    "a hybrid engine": ({"hybrid_engine": {"enabled": True, "max_out_tokens": 512}}, "hybrid_engine: "),
    "a limit of the norm for the optimizer": (
        {"optimizer": {"type": "Adam", "params": {"lr": 1e-3, "max_grad_norm": 1.0}}},
        "max_grad_norm: 1.0 .*gradient_clipping",
    ),
}


@pytest.mark.parametrize("name", TAKEN)
def test_configurations_that_are_taken(name: str) -> None:
    config = RunConfig.parse(translate(TAKEN[name]).config)
    resolve(config, 8, "cpu")


@pytest.mark.parametrize("name", REFUSED)
def test_configurations_that_are_refused_by_name(name: str) -> None:
    given, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        translate({"train_batch_size": 8, **given})


def test_what_is_not_read_is_told() -> None:
    """A comment is no key at any depth, and a name with dots is not the key of its block: the block's value stays."""
    made = translate(TAKEN["vision and language, comments everywhere"])
    skipped = {note.path: note.fate for note in made.notes if "underscore" in note.said}
    assert skipped == {
        "__note__": "idle",
        "zero_optimization._why": "idle",
        "zero_optimization.offload_param._c": "idle",
    }
    made = translate(TAKEN["reinforcement learning, keys with dots"])
    assert sum("no name with dots" in note.said for note in made.notes) == 3
    assert made.values["zero_optimization.stage3_param_persistence_threshold"] == 100_000
    with pytest.raises(ConfigError, match=r"unknown key 'zero_optimization\.stag'"):
        translate({"zero_optimization.stag": 3})


def test_weights_in_bf16_under_autocast_and_adam_without_correction() -> None:
    precision = RunConfig.parse(translate(TAKEN["masters in fp32, autocast"]).config).precision
    assert (precision.compute, precision.operations, precision.master) == ("bf16", "bf16", None)
    optimizer = RunConfig.parse(translate(TAKEN["BERT on answers"]).config).optimizer
    assert (optimizer.type, optimizer.correct) == ("adamw", "none")
    assert optimizer.rules()[0][0] == "uncorrected_adamw"
