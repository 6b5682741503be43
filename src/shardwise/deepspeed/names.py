"""The table of names: what each name of DeepSpeed's is here, by its dotted path.

    NAMES["ops.adam"]["FusedAdam"] = "deepspeed.optimizer_classes:FusedAdam"

A home is ``module:attribute`` below ``shardwise``, or of torch's. ``Refused`` stands for a name that may be imported
and is not supported: it says what to do instead when it is used. ``OTHERS`` has the module that a path turns to for all
other names. A path of the table is a module, and so is every path on the way to it; importer.py makes them.
"""

from typing import NamedTuple

FOLLOWED_VERSION = "0.19.8"
"""Of DeepSpeed, whose names and keys these are."""


class Refused(NamedTuple):
    """A name that is not supported."""

    why: str
    """What to do instead, in one sentence."""


Rows = dict[str, str | Refused]
"""Homes by name."""


def _all(home: str, names: str) -> Rows:
    """Rows of names that are called the same in ``home``."""
    return {name: f"deepspeed.{home}:{name}" for name in names.split()}


def _none(why: str, names: str) -> Rows:
    """Rows of names that are not supported, for one reason."""
    return {name: Refused(why) for name in names.split()}


_INSIDE_EXPERTS = (
    "an inner part of DeepSpeed's layer of experts; use moe.layer.MoE, or shardwise.MixtureOfExperts and "
    "shardwise.RouterPolicy, which say all that a router does"
)
_KERNELS = "there are no kernels of DeepSpeed's here; torch's own operations are used, and compile: blocks fuses them"
_SEQUENCE = (
    "the sequence is cut beside tensor parallelism (tensor.sequence_parallel), not over ranks of its own"
)
_INJECTION = "modules are not replaced by class; tensor_parallel cuts the model's own"
_COMPRESSION = "models are not compressed here"
_TILES = "a layer is not cut into tiles; zero.units gathers layer by layer"
_BY_TOKENS = (
    "tiles of tokens are a matter of the configuration: tiles.mlp and tiles.logits, with no call in the model"
)

_ENGINE: Rows = {
    "DeepSpeedEngine": "deepspeed.engine:DeepSpeedEngine",
    "DeepSpeedOptimizerCallable": "deepspeed.build:Optimizer",
    "DeepSpeedSchedulerCallable": "deepspeed.build:Scheduler",
}
_LOGS = _all("logs", "logger log_dist log_dist_once set_log_level_from_string")
_FRAGMENTS = _all(
    "fragments",
    "safe_get_full_fp32_param safe_set_full_fp32_param safe_get_full_optimizer_state safe_set_full_optimizer_state "
    "safe_get_full_grad safe_set_full_grad safe_update_full_grad_vectorized safe_get_local_fp32_param "
    "safe_set_local_fp32_param safe_get_local_optimizer_state safe_set_local_optimizer_state safe_get_local_grad "
    "safe_set_local_grad",
)
_LEAVES = _all(
    "leaf_modules",
    "set_z3_leaf_modules set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix set_z3_leaf_module "
    "unset_z3_leaf_modules get_z3_leaf_modules z3_leaf_module",
)
_GROUPS = _all(
    "groups",
    "get_data_parallel_rank get_data_parallel_world_size get_data_parallel_group get_tensor_model_parallel_rank "
    "get_tensor_model_parallel_world_size get_tensor_model_parallel_src_rank get_tensor_model_parallel_group "
    "_get_sequence_parallel_world_size _get_sequence_parallel_rank _get_sequence_parallel_group "
    "_get_expert_parallel_group _get_expert_parallel_rank _get_expert_parallel_world_size "
    "_get_expert_data_parallel_group _get_expert_data_parallel_rank _get_expert_data_parallel_world_size "
    "_get_max_expert_size _get_max_expert_size_name",
) | {
    "get_model_parallel_rank": "deepspeed.groups:get_tensor_model_parallel_rank",
    "get_model_parallel_world_size": "deepspeed.groups:get_tensor_model_parallel_world_size",
    "get_model_parallel_group": "deepspeed.groups:get_tensor_model_parallel_group",
    "_get_data_parallel_rank": "deepspeed.groups:get_data_parallel_rank",
    "_get_data_parallel_world_size": "deepspeed.groups:get_data_parallel_world_size",
    "_get_data_parallel_group": "deepspeed.groups:get_data_parallel_group",
    "_get_sequence_data_parallel_rank": "deepspeed.groups:get_data_parallel_rank",
    "_get_sequence_data_parallel_world_size": "deepspeed.groups:get_data_parallel_world_size",
    "_get_sequence_data_parallel_group": "deepspeed.groups:get_data_parallel_group",
}
_PARTITIONED = {
    **_all(
        "partitioned",
        "GatheredParameters register_external_parameter unregister_external_parameter unwrap_model_for_generation",
    ),
    **_all("enums", "ZeroParamStatus ZeroParamType"),
    **_all("construction", "Init"),
    "MiCS_Init": "deepspeed.construction:Init",
}
_ESTIMATES_2 = _all(
    "memory_estimates",
    "estimate_zero2_model_states_mem_needs_all_live estimate_zero2_model_states_mem_needs_all_cold",
)
_ESTIMATES_3 = _all(
    "memory_estimates",
    "estimate_zero3_model_states_mem_needs_all_live estimate_zero3_model_states_mem_needs_all_cold",
)
_COMM = _all(
    "collectives",
    "init_distributed is_initialized is_available get_rank get_world_size get_local_rank get_world_group "
    "get_global_rank get_all_ranks_from_group inference_all_reduce allgather_fn reduce_scatter_fn "
    "has_all_gather_into_tensor has_reduce_scatter_tensor has_all_reduce_coalesced has_coalescing_manager "
    "initialize_mesh_device configure log_summary",
)
_CHECKPOINTING = {
    **_all(
        "recompute_calls",
        "configure is_configured reset set_num_layers partition_activations_in_checkpoint checkpoint "
        "non_reentrant_checkpoint",
    ),
    **_all(
        "random_streams",
        "CudaRNGStatesTracker get_cuda_rng_tracker model_parallel_cuda_manual_seed "
        "model_parallel_reconfigure_tp_seed",
    ),
}
_TOPOLOGY = _all(
    "topology",
    "ProcessTopology PipeDataParallelTopology PipeModelDataParallelTopology PipelineParallelGrid",
)
_PIPE: Rows = {
    **_all("pipeline_module", "PipelineModule TiedLayerSpec"),
    "LayerSpec": "deepspeed.pipeline_module:SpecOfModule",
    **_none("use PipelineModule: its stages run 1F1B", "DualPipeVModule"),
}
_ACCELERATOR = _all(
    "device", "get_accelerator set_accelerator is_current_accelerator_supported DeepSpeedAccelerator"
)
_LOADERS = _all("loader", "RepeatingLoader DeepSpeedDataLoader")
_CONFIG = _all("settings", "DeepSpeedConfig DeepSpeedConfigError")
_PROFILE = _all("model_profile", "FlopsProfiler get_model_profile")
_LION = _all("optimizer_classes", "FusedLion DeepSpeedCPULion")
_ADAM = _all("optimizer_classes", "FusedAdam DeepSpeedCPUAdam")

NAMES: dict[str, Rows] = {
    "": {
        "initialize": "deepspeed.build:initialize",
        "add_config_arguments": "deepspeed.arguments:add_config_arguments",
        "init_distributed": "deepspeed.collectives:init_distributed",
        **_all("inference", "init_inference InferenceEngine"),
        "get_accelerator": "deepspeed.device:get_accelerator",
        **_ENGINE,
        **_CONFIG,
        **_all("loader", "DeepSpeedDataLoader"),
        **_all("rate_schedulers", "add_tuning_arguments"),
        **_all("optimizer", "DeepSpeedOptimizer"),
        **_all("pipeline_module", "PipelineModule"),
        **_all("pipeline_engine", "PipelineEngine"),
        **_all("logs", "logger log_dist"),
        **_all("construction", "OnDevice"),
        "dist": "comm.default_group",
        **_none(
            "this engine trains alone; generate with engine.ours.run('generate', ...)",
            "DeepSpeedHybridEngine",
        ),
        **_none(
            _INJECTION, "replace_transformer_layer revert_transformer_layer set_autotp_mode tp_model_init"
        ),
        **_none(_KERNELS, "DeepSpeedTransformerLayer DeepSpeedTransformerConfig"),
    },
    "accelerator": _ACCELERATOR,
    "accelerator.real_accelerator": _ACCELERATOR,
    "accelerator.abstract_accelerator": _ACCELERATOR,
    "checkpoint.utils": _all("small_functions", "clone_tensors_for_torch_save"),
    "checkpointing": _CHECKPOINTING,
    "comm": _COMM,
    "comm.comm": _COMM,
    "compression.compress": _none(_COMPRESSION, "init_compression redundancy_clean student_initialization"),
    "linear": _none(
        "use torch.nn.Linear; frozen weights take no optimizer state",
        "OptimizedLinear LoRAConfig QuantizationConfig",
    ),
    "moe.experts": _none(_INSIDE_EXPERTS, "Experts"),
    "moe.layer": _all("experts", "MoE"),
    "moe.mappings": _none(_INSIDE_EXPERTS, "drop_tokens gather_tokens"),
    "moe.sharded_moe": _none(
        _INSIDE_EXPERTS,
        "MOELayer TopKGate top1gating top2gating topkgating gumbel_rsample multiplicative_jitter einsum _AllToAll "
        "_capacity TOPK_GATE_TIMER MOE_TIMER FIRST_ALLTOALL_TIMER SECOND_ALLTOALL_TIMER",
    ),
    "moe.utils": {
        **_all(
            "experts",
            "is_moe_param has_moe_layers is_moe_param_group configure_moe_param_groups "
            "split_params_into_different_moe_groups_for_optimizer split_params_into_shared_and_expert_params",
        ),
        **_none(
            "gradients are no attribute of parameters; engine.get_global_grad_norm() is the norm of all, experts too, "
            "and safe_get_full_grad gives one",
            "split_params_grads_into_shared_and_expert_params",
        ),
    },
    "module_inject": _none(_INJECTION, "replace_transformer_layer HFBertLayerPolicy DSPolicy"),
    "ops.adagrad": _all("optimizer_classes", "DeepSpeedCPUAdagrad"),
    "ops.adam": _ADAM,
    "ops.adam.cpu_adam": _all("optimizer_classes", "DeepSpeedCPUAdam"),
    "ops.adam.fused_adam": _all("optimizer_classes", "FusedAdam"),
    "ops.lamb": _all("optimizer_classes", "FusedLamb"),
    "ops.lamb.fused_lamb": _all("optimizer_classes", "FusedLamb"),
    "ops.lion": _LION,
    "ops.lion.cpu_lion": _LION,
    "ops.lion.fused_lion": _LION,
    "ops.op_builder": _none(
        _KERNELS,
        "CPUAdamBuilder FusedAdamBuilder FusedLambBuilder UtilsBuilder AsyncIOBuilder InferenceBuilder",
    ),
    "ops.sparse_attention": _none(
        _KERNELS, "SparseSelfAttention SparsityConfig FixedSparsityConfig BigBirdSparsityConfig"
    ),
    "ops.transformer": _none(_KERNELS, "DeepSpeedTransformerLayer DeepSpeedTransformerConfig"),
    "profiling.flops_profiler": _PROFILE,
    "profiling.flops_profiler.profiler": _PROFILE,
    "runtime.activation_checkpointing.checkpointing": _CHECKPOINTING,
    "runtime.base_optimizer": _all("optimizer", "DeepSpeedOptimizer ZeROOptimizer"),
    "runtime.config": _CONFIG,
    "runtime.config_utils": _CONFIG,
    "runtime.dataloader": _LOADERS,
    "runtime.engine": _ENGINE,
    "runtime.lr_schedules": _all(
        "rate_schedulers",
        "LRRangeTest OneCycle WarmupLR WarmupDecayLR WarmupCosineLR VALID_LR_SCHEDULES add_tuning_arguments",
    ),
    "runtime.pipe.topology": _TOPOLOGY,
    "pipe": _PIPE,
    "runtime.pipe": {**_PIPE, **_all("topology", "ProcessTopology")},
    "runtime.pipe.module": {**_PIPE, **_all("pipeline_module", "PipelineError")},
    "runtime.pipe.engine": _all("pipeline_engine", "PipelineEngine")
    | _all("pipeline_module", "PipelineError"),
    "runtime.utils": {
        **_all(
            "small_functions",
            "empty_cache memory_status clip_grad_norm_ call_to_str partition_uniform required_torch_version",
        ),
        **_all("random_streams", "set_random_seed"),
        **_all("logs", "see_memory_usage"),
    },
    "runtime.zero": _PARTITIONED,
    "runtime.zero.config": _all("enums", "ZeroStageEnum DeepSpeedZeroConfig"),
    "runtime.zero.offload_config": _all("enums", "OffloadDeviceEnum OffloadStateTypeEnum"),
    "runtime.zero.partition_parameters": {
        **_PARTITIONED,
        **_all("construction", "zero_wrapper_for_fp_tensor_constructor"),
        "_orig_torch_arange": "torch:arange",
    },
    "runtime.constants": _all("enums", "ValidationMode"),
    "runtime.zero.stage3": {
        **_ESTIMATES_3,
        **_all("partitioned", "unwrap_model_for_generation"),
        **_all("optimizer", "DeepSpeedZeroOptimizer_Stage3"),
    },
    "runtime.zero.stage_1_and_2": {**_ESTIMATES_2, **_all("optimizer", "DeepSpeedZeroOptimizer")},
    "runtime.zero.tiling": _none(_TILES, "TiledLinear TiledLinearReturnBias"),
    "runtime.zero.utils": _all("fragments", "is_zero_param"),
    "sequence.layer": _none(_SEQUENCE, "DistributedAttention"),
    "runtime.sequence_parallel.ulysses_sp": {
        **_none(_SEQUENCE, "UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter"),
        **_none(_BY_TOKENS, "SequenceTiledCompute TiledMLP TiledFusedLogitsLoss"),
    },
    "utils": {
        **_LOGS,
        **_FRAGMENTS,
        **_LEAVES,
        **_GROUPS,
        **_all("logs", "instrument_w_nvtx"),
        **_all("loader", "RepeatingLoader"),
        **_all("small_functions", "recursive_getattr"),
        **_all("construction", "OnDevice"),
    },
    "utils.init_on_device": _all("construction", "OnDevice"),
    "utils.timer": _all("timers", "SynchronizedWallClockTimer"),
    "utils.groups": _GROUPS,
    "utils.logging": {**_LOGS, **_all("logs", "print_dist print_rank_0 warning_once")},
    "utils.nvtx": _all("logs", "instrument_w_nvtx"),
    "utils.tensor_fragment": _FRAGMENTS,
    "utils.z3_leaf_module": _LEAVES,
    "utils.zero_to_fp32": _all(
        "whole_states",
        "get_fp32_state_dict_from_zero_checkpoint convert_zero_checkpoint_to_fp32_state_dict "
        "load_state_dict_from_zero_checkpoint",
    ),
    "zero": {**_PARTITIONED, **_none(_TILES, "TiledLinear TiledLinearReturnBias")},
}
"""By path and name."""

OTHERS = {"comm": "comm.default_group", "comm.comm": "comm.default_group"}
"""Where a path has all names of a module beside its own: torch.distributed's."""
