"""``engine.train_batch_size()`` and similar methods without arguments, each of which returns the value of one key.

A row of the table has the method and the key in a DeepSpeed file. The value is the file's value, or else the key's
default. docs/deepspeed.md documents which keys have an effect, and why the others have none.
"""

from collections.abc import Callable
from typing import Any

_ZERO = "zero_optimization"
_KEYS = {
    "train_batch_size": "train_batch_size",
    "train_micro_batch_size_per_gpu": "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "managed_gradient_accumulation": "managed_gradient_accumulation",
    "steps_per_print": "steps_per_print",
    "dump_state": "dump_state",
    "wall_clock_breakdown": "wall_clock_breakdown",
    "memory_breakdown": "memory_breakdown",
    "gradient_clipping": "gradient_clipping",
    "gradient_predivide_factor": "gradient_predivide_factor",
    "dataloader_drop_last": "dataloader_drop_last",
    "log_level": "log_level",
    "zero_allow_untested_optimizer": "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer": "zero_force_ds_cpu_optimizer",
    "optimizer_params": "optimizer.params",
    "optimizer_legacy_fusion": "optimizer.legacy_fusion",
    "scheduler_name": "scheduler.type",
    "scheduler_params": "scheduler.params",
    "fp16_enabled": "fp16.enabled",
    "fp16_auto_cast": "fp16.auto_cast",
    "fp16_master_weights_and_gradients": "fp16.fp16_master_weights_and_grads",
    "loss_scale": "fp16.loss_scale",
    "bfloat16_enabled": "bf16.enabled",
    "bf16_master_weights_and_gradients": "bf16.bf16_master_weights_and_grads",
    "bf16_optimizer_states": "bf16.bf16_optimizer_states",
    "torch_autocast_enabled": "torch_autocast.enabled",
    "torch_autocast_dtype": "torch_autocast.dtype",
    "torch_autocast_lower_precision_safe_modules": "torch_autocast.lower_precision_safe_modules",
    "zero_optimization_stage": f"{_ZERO}.stage",
    "zero_overlap_comm": f"{_ZERO}.overlap_comm",
    "zero_reduce_scatter": f"{_ZERO}.reduce_scatter",
    "zero_reduce_bucket_size": f"{_ZERO}.reduce_bucket_size",
    "zero_multi_rank_bucket_allreduce": f"{_ZERO}.use_multi_rank_bucket_allreduce",
    "zero_allgather_bucket_size": f"{_ZERO}.allgather_bucket_size",
    "zero_allgather_partitions": f"{_ZERO}.allgather_partitions",
    "zero_contiguous_gradients": f"{_ZERO}.contiguous_gradients",
    "zero_load_from_fp32_weights": f"{_ZERO}.load_from_fp32_weights",
    "zero_elastic_checkpoint": f"{_ZERO}.elastic_checkpoint",
    "zero_sub_group_size": f"{_ZERO}.sub_group_size",
    "zero_offload_optimizer": f"{_ZERO}.offload_optimizer",
    "zero_offload_param": f"{_ZERO}.offload_param",
    "zero_max_live_parameters": f"{_ZERO}.stage3_max_live_parameters",
    "zero_max_reuse_distance": f"{_ZERO}.stage3_max_reuse_distance",
    "zero_prefetch_bucket_size": f"{_ZERO}.stage3_prefetch_bucket_size",
    "zero_module_granularity_threshold": f"{_ZERO}.stage3_module_granularity_threshold",
    "zero_param_persistence_threshold": f"{_ZERO}.stage3_param_persistence_threshold",
    "zero_model_persistence_threshold": f"{_ZERO}.stage3_model_persistence_threshold",
    "zero_gather_16bit_weights_on_model_save": f"{_ZERO}.stage3_gather_16bit_weights_on_model_save",
    "zero_allgather_sequential": f"{_ZERO}.stage3_allgather_sequential",
    "zero_legacy_stage1": f"{_ZERO}.legacy_stage1",
    "zero_ignore_unused_parameters": f"{_ZERO}.ignore_unused_parameters",
    "zero_save_muon_momentum_buffer_in_memory": f"{_ZERO}.save_muon_momentum_buffer_in_memory",
    "zero_round_robin_gradients": f"{_ZERO}.round_robin_gradients",
    "zero_hpz_partition_size": f"{_ZERO}.zero_hpz_partition_size",
    "zero_quantized_weights": f"{_ZERO}.zero_quantized_weights",
    "zero_quantized_nontrainable_weights": f"{_ZERO}.zero_quantized_nontrainable_weights",
    "zero_quantized_gradients": f"{_ZERO}.zero_quantized_gradients",
    "zero_log_trace_cache_warnings": f"{_ZERO}.log_trace_cache_warnings",
    "zenflow_config": f"{_ZERO}.zenflow",
    "is_sanity_checks_enabled": f"{_ZERO}.enable_sanity_checks",
    "aio_config": "aio",
    "tensor_parallel_config": "tensor_parallel",
    "autotp_size": "tensor_parallel.autotp_size",
    "use_node_local_storage": "checkpoint.use_node_local_storage",
    "load_universal_checkpoint": "checkpoint.load_universal",
    "checkpoint_serialization_enabled": "checkpoint.checkpoint_serialization",
    "flops_profiler_enabled": "flops_profiler.enabled",
    "flops_profiler_recompute_fwd_factor": "flops_profiler.recompute_fwd_factor",
    "flops_profiler_profile_step": "flops_profiler.profile_step",
    "flops_profiler_module_depth": "flops_profiler.module_depth",
    "flops_profiler_top_modules": "flops_profiler.top_modules",
    "flops_profiler_detailed": "flops_profiler.detailed",
    "flops_profiler_output_file": "flops_profiler.output_file",
    "autotuning_enabled": "autotuning.enabled",
    "autotuning_start_profile_step": "autotuning.start_profile_step",
    "autotuning_end_profile_step": "autotuning.end_profile_step",
    "autotuning_metric": "autotuning.metric",
    "autotuning_metric_path": "autotuning.metric_path",
    "data_efficiency_enabled": "data_efficiency.enabled",
    "data_efficiency_config": "data_efficiency",
    "data_sampling_enabled": "data_efficiency.data_sampling.enabled",
    "data_sampling_config": "data_efficiency.data_sampling",
    "curriculum_learning_enabled": "data_efficiency.data_sampling.curriculum_learning.enabled",
    "curriculum_learning_config": "data_efficiency.data_sampling.curriculum_learning",
    "random_ltd_enabled": "data_efficiency.data_routing.random_ltd.enabled",
    "random_ltd_config": "data_efficiency.data_routing.random_ltd",
}
"""The key whose value each method returns."""
_MORE: dict[str, Callable[[Callable[[str], Any]], Any]] = {
    "zero_optimization": lambda key: key(f"{_ZERO}.stage") > 0,
    "zero_optimization_partition_gradients": lambda key: key(f"{_ZERO}.stage") >= 2,
    "zero_optimization_partition_weights": lambda key: key(f"{_ZERO}.stage") >= 3,
    "is_first_weights_partition_group": lambda key: key(f"{_ZERO}.stage") >= 3,
    "zero_use_cpu_optimizer": lambda key: _device(key) in ("cpu", "nvme"),
    "zero_cpu_offload": lambda key: _device(key) == "cpu",
    "zero_nvme_offload_optimizer": lambda key: _device(key) == "nvme",
    "zero_has_nvme_offload": lambda key: "nvme" in (_device(key), _device(key, "offload_param")),
    "zero_partial_offload": lambda key: (key(f"{_ZERO}.offload_optimizer") or {}).get("ratio", 1.0),
    "super_offload": lambda key: (key(f"{_ZERO}.offload_optimizer") or {}).get("super_offload", False),
    "postscale_gradients": lambda key: not key("prescale_gradients"),
    "dynamic_loss_scale": lambda key: key("fp16.loss_scale") == 0,
    "initial_dynamic_scale": lambda key: 2.0 ** key("fp16.initial_scale_power"),
    "checkpoint_tag_validation_enabled": lambda key: (
        str(key("checkpoint.tag_validation")).lower() != "ignore"
    ),
    "checkpoint_tag_validation_fail": lambda key: str(key("checkpoint.tag_validation")).lower() == "fail",
    "zero_compute_grad_norm": lambda key: True,
    "zero_parameter_alignment": lambda key: None,
    "checkpoint_writer_enabled": lambda key: key("checkpoint.writer") is not None,
    "cpuadam_cores_perc": lambda key: (key(f"{_ZERO}.offload_optimizer") or {}).get(
        "cpuadam_cores_perc", 0.9
    ),
    "compile_zero_optimization_stage": lambda key: bool({"z1", "z3"} & {*(key("compile.passes") or ())}),
    "uses_parallelization_pass_only": lambda key: bool(
        {"autosp", "autotp"} & {*(key("compile.passes") or ())}
    ),
    "autotuning_profile_model_info": lambda key: False,
    "autotuning_model_info_path": lambda key: key("autotuning.model_info_path"),
    "is_compiled": lambda key: bool(key("compile.deepcompile")),
    "compile_autosp": lambda key: "autosp" in (key("compile.passes") or ()),
    "compile_autotp": lambda key: "autotp" in (key("compile.passes") or ()),
    "swap_tensor_config": lambda key: key("aio"),
}
"""The function of a key lookup that computes the result of each other method."""

NAMES = frozenset({*_KEYS, *_MORE})


def answer(name: str, key: Callable[[str], Any]) -> Any:
    """Return the result of the method ``name``.

    Args:
        name: One of ``NAMES``.
        key: A function that returns the value of a key, given its dotted path.
    """
    return key(_KEYS[name]) if name in _KEYS else _MORE[name](key)


def _device(key: Callable[[str], Any], block: str = "offload_optimizer") -> str:
    return str((key(f"{_ZERO}.{block}") or {}).get("device", "none"))
