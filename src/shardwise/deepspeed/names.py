"""The table of DeepSpeed's names: for each dotted path and name, the object of this package that implements the name.

    NAMES["ops.adam"]["FusedAdam"] = "deepspeed.training.optimizer_classes:FusedAdam"

A home is ``module:attribute``, below ``shardwise`` or in torch. ``UnsupportedName`` marks a name that may be imported
but is not supported: a use raises an error that says what to do instead. ``OTHERS`` contains the module in which a path
looks up all other names. Each path of the table, and each prefix of a path, is a module; importer.py makes these
modules.
"""

from typing import Any, NamedTuple

FOLLOWED_VERSION = "0.19.8"
"""The DeepSpeed version whose names and keys the table follows."""


class UnsupportedName(NamedTuple):
    """A name of DeepSpeed's that is not supported."""

    why: str
    """The replacement, in one sentence."""


class ConstantName(NamedTuple):
    """A name whose value is a word or a number."""

    value: Any


Rows = dict[str, str | UnsupportedName | ConstantName]
"""The home of each name."""


def _all(home: str, names: str) -> Rows:
    """Return rows for names that are the same in ``home``."""
    return {name: f"deepspeed.{home}:{name}" for name in names.split()}


def _none(why: str, names: str) -> Rows:
    """Return rows for names that are unsupported for the same reason ``why``."""
    return {name: UnsupportedName(why) for name in names.split()}


def _words(names: str) -> Rows:
    """Return rows for constants whose value is the name in lower case: ``WARMUP_MIN_LR`` is ``"warmup_min_lr"``."""
    return {name: ConstantName(name.lower()) for name in names.split()}


def _values(**values: Any) -> Rows:
    """Return rows for constants with these values."""
    return {name: ConstantName(value) for name, value in values.items()}


_INSIDE_EXPERTS = (
    "an inner part of DeepSpeed's layer of experts; use moe.layer.MoE, or shardwise.MixtureOfExperts and "
    "shardwise.RouterPolicy, which say all that a router does"
)
_KERNELS = "there are no kernels of DeepSpeed's here; torch's own operations are used, and compile: blocks fuses them"
_SEQUENCE = (
    "the engine exchanges keys in the model's own attention where sequence_parallel_size cuts sequences; call the "
    "local attention in its place, and give the model whole sequences"
)
_INJECTION = "modules are not replaced by class; tensor_parallel cuts the model's own"
_COMPRESSION = "models are not compressed here"
_TILES = "a layer is not cut into tiles; zero.units gathers layer by layer"
_BY_TOKENS = (
    "tiles of tokens are a matter of the configuration: tiles.mlp and tiles.logits, with no call in the model"
)

_ENGINE: Rows = {
    "DeepSpeedEngine": "deepspeed.training.engine:DeepSpeedEngine",
    "DeepSpeedOptimizerCallable": "deepspeed.training.build:Optimizer",
    "DeepSpeedSchedulerCallable": "deepspeed.training.build:Scheduler",
}
_LOGS = _all("calls.logs", "logger log_dist log_dist_once set_log_level_from_string")
_FRAGMENTS = _all(
    "files.fragments",
    "safe_get_full_fp32_param safe_set_full_fp32_param safe_get_full_optimizer_state safe_set_full_optimizer_state "
    "safe_get_full_grad safe_set_full_grad safe_update_full_grad_vectorized safe_get_local_fp32_param "
    "safe_set_local_fp32_param safe_get_local_optimizer_state safe_set_local_optimizer_state safe_get_local_grad "
    "safe_set_local_grad",
)
_LEAVES = _all(
    "training.leaf_modules",
    "set_z3_leaf_modules set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix set_z3_leaf_module "
    "unset_z3_leaf_modules get_z3_leaf_modules z3_leaf_module",
)
_GROUPS = _all(
    "calls.groups",
    "get_data_parallel_rank get_data_parallel_world_size get_data_parallel_group get_tensor_model_parallel_rank "
    "get_tensor_model_parallel_world_size get_tensor_model_parallel_src_rank get_tensor_model_parallel_group "
    "_get_sequence_parallel_world_size _get_sequence_parallel_rank _get_sequence_parallel_group "
    "_get_sequence_data_parallel_world_size _get_sequence_data_parallel_rank _get_sequence_data_parallel_group "
    "_get_expert_parallel_group _get_expert_parallel_rank _get_expert_parallel_world_size "
    "_get_expert_data_parallel_group _get_expert_data_parallel_rank _get_expert_data_parallel_world_size "
    "_get_max_expert_size _get_max_expert_size_name _get_expert_parallel_ranks",
) | {
    "get_model_parallel_rank": "deepspeed.calls.groups:get_tensor_model_parallel_rank",
    "get_model_parallel_world_size": "deepspeed.calls.groups:get_tensor_model_parallel_world_size",
    "get_model_parallel_group": "deepspeed.calls.groups:get_tensor_model_parallel_group",
    "_get_data_parallel_rank": "deepspeed.calls.groups:get_data_parallel_rank",
    "_get_data_parallel_world_size": "deepspeed.calls.groups:get_data_parallel_world_size",
    "_get_data_parallel_group": "deepspeed.calls.groups:get_data_parallel_group",
}
_PARTITIONED = {
    **_all(
        "files.partitioned",
        "GatheredParameters register_external_parameter unregister_external_parameter unwrap_model_for_generation",
    ),
    **_all("calls.enums", "ZeroParamStatus ZeroParamType"),
    **_all("training.construction", "Init"),
    "MiCS_Init": "deepspeed.training.construction:Init",
}
_ESTIMATES_2 = _all(
    "calls.memory_estimates",
    "estimate_zero2_model_states_mem_needs_all_live estimate_zero2_model_states_mem_needs_all_cold",
)
_ESTIMATES_3 = _all(
    "calls.memory_estimates",
    "estimate_zero3_model_states_mem_needs_all_live estimate_zero3_model_states_mem_needs_all_cold",
)
_COMM = _all(
    "calls.collectives",
    "init_distributed is_initialized is_available get_rank get_world_size get_local_rank get_world_group "
    "get_global_rank get_all_ranks_from_group inference_all_reduce allgather_fn reduce_scatter_fn "
    "has_all_gather_into_tensor has_reduce_scatter_tensor has_all_reduce_coalesced has_coalescing_manager "
    "initialize_mesh_device configure log_summary",
)
_CHECKPOINTING = {
    **_all(
        "training.recompute_calls",
        "configure is_configured reset set_num_layers partition_activations_in_checkpoint checkpoint "
        "non_reentrant_checkpoint",
    ),
    **_all(
        "calls.random_streams",
        "CudaRNGStatesTracker get_cuda_rng_tracker model_parallel_cuda_manual_seed "
        "model_parallel_reconfigure_tp_seed",
    ),
}
_TOPOLOGY = _all(
    "training.topology",
    "ProcessTopology PipeDataParallelTopology PipeModelDataParallelTopology PipelineParallelGrid",
)
_PIPE: Rows = {
    **_all("training.pipeline_module", "PipelineModule DualPipeVModule TiedLayerSpec"),
    "LayerSpec": "deepspeed.training.pipeline_module:SpecOfModule",
}
_ACCELERATOR = _all(
    "calls.device", "get_accelerator set_accelerator is_current_accelerator_supported DeepSpeedAccelerator"
)
_LOADERS = _all("training.loader", "RepeatingLoader DeepSpeedDataLoader")
_CONFIG = _all("training.settings", "DeepSpeedConfig DeepSpeedConfigError")
_OFFLOAD_MODELS = _all(
    "training.config_models", "DeepSpeedZeroOffloadParamConfig DeepSpeedZeroOffloadOptimizerConfig"
)
_OPTIMIZERS = "ADAGRAD ADAM ADAMW LAMB ONEBIT_ADAM ZERO_ONE_ADAM ONEBIT_LAMB MUADAM MUADAMW MUSGD LION MUON"
_OPTIMIZER_WORDS: Rows = {
    f"{name}_OPTIMIZER": ConstantName(name.lower().replace("_", "")) for name in _OPTIMIZERS.split()
}
_SAVED_WORDS = _words(
    "OPTIMIZER_STATE_DICT FP32_GROUPS FP32_FLAT_GROUPS BASE_OPTIMIZER_STATE BASE_OPTIMIZER_STATE_STEP "
    "SINGLE_PARTITION_OF_FP32_GROUPS PARAM_GROUPS GROUP_PADDINGS PARAM_ALIGNMENT_PADDINGS PARTITION_COUNT ZERO_STAGE "
    "CLIP_GRAD LOSS_SCALER PARAM PARAM_SHAPES BUFFER_NAMES FROZEN_PARAM_SHAPES FROZEN_PARAM_FRAGMENTS DS_VERSION "
    "UNIVERSAL_CHECKPOINT_INFO AUTOTP_UNSUPPORTED_PARAMETER_PATTERNS AFFINE_MAP VOCAB_TENSOR PADDED_VOCAB_SIZE "
    "ORIGINAL_VOCAB_SIZE PARAM_SLICE_MAPPINGS CAT_DIM PARAM_N_SUB_PARAMS SUB_PARAM_SHAPE SUB_PARAM_SHARD_WIDTHS "
    "SUB_PARAMS_SHAPE VOCABULARY_PARAMETER_PATTERNS PIPELINE_REPLICATED_PARAMETER_PATTERNS "
    "PARAMETER_TO_AVERAGE_PATTERNS PARAMETER_WITH_ROW_PARALLELISM_PATTERNS TP_REPLICATED_PARAMETER_PATTERNS "
    "PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0 PARAMETER_WITH_SUB_PARAMS EP_NUM_EXPERTS EXPERT_PARAMETER_PATTERNS"
) | _values(
    FP32_WEIGHT_KEY="fp32",
    MODEL_FILE_PREFIX="mp_rank_",
    ZERO_FILE_PREFIX="zero_pp_rank_",
    BF16_ZERO_FILE_PREFIX="bf16_zero_pp_rank_",
    FP16_ZERO_FILE_PREFIX="fp16_zero_pp_rank_",
    LAYER_FILE_PREFIX="layer_",
    OPTIM_FILE_SUFFIX="_optim_states.pt",
    MODEL_FILE_SUFFIX="_model_states.pt",
    CHECKPOINT_PARALLEL_DIMS="checkpoint_parallel_dimensions",
    CHECKPOINT_PP_DEGREE="pp_degree",
    CHECKPOINT_TP_DEGREE="tp_degree",
    UNIVERSAL_CHECKPOINT_VERSION_KEY="universal_checkpoint_version",
    UNIVERSAL_CHECKPOINT_VERSION_VALUE=0.4,
    DS_AUTOTP_UC_META="ds_autotp_universal_checkpoint_meta",
    EP_IS_EXPERT_PARAM="is_expert_param",
)
_VERSION = _all("calls.version_facts", "version git_hash git_branch")
_SCALERS = "the loss scale is precision.loss_scale of the configuration"
_PROFILE = _all("training.model_profile", "FlopsProfiler get_model_profile")
_LION = _all("training.optimizer_classes", "FusedLion DeepSpeedCPULion")
_ADAM = _all("training.optimizer_classes", "FusedAdam DeepSpeedCPUAdam")

_BUILDER_FILES = {
    f"ops.op_builder.{file}": _all("calls.builders", f"{name}Builder")
    for file, name in {
        "async_io": "AsyncIO",
        "cpu_adagrad": "CPUAdagrad",
        "cpu_adam": "CPUAdam",
        "cpu_lion": "CPULion",
        "evoformer_attn": "EvoformerAttn",
        "fp_quantizer": "FPQuantizer",
        "fused_adam": "FusedAdam",
        "fused_lamb": "FusedLamb",
        "fused_lion": "FusedLion",
        "gds": "GDS",
        "inference_core_ops": "InferenceCoreOps",
        "inference_cutlass_builder": "InferenceCutlass",
        "pin_memory": "PinMemory",
        "quantizer": "Quantizer",
        "ragged_ops": "RaggedOps",
        "ragged_utils": "RaggedUtils",
        "random_ltd": "RandomLTD",
        "sparse_attn": "SparseAttn",
        "spatial_inference": "SpatialInference",
        "stochastic_transformer": "StochasticTransformer",
        "transformer": "Transformer",
        "transformer_inference": "Inference",
        "utils": "Utils",
    }.items()
}

NAMES: dict[str, Rows] = {
    "": {
        "initialize": "deepspeed.training.build:initialize",
        "add_config_arguments": "deepspeed.calls.arguments:add_config_arguments",
        "init_distributed": "deepspeed.calls.collectives:init_distributed",
        **_all("training.answering", "init_inference InferenceEngine"),
        "get_accelerator": "deepspeed.calls.device:get_accelerator",
        **_ENGINE,
        **_CONFIG,
        **_VERSION,
        **_OPTIMIZER_WORDS,
        **_values(TORCH_DISTRIBUTED_DEFAULT_PORT=29500),
        **_all("training.loader", "DeepSpeedDataLoader"),
        **_all("training.rate_schedulers", "add_tuning_arguments"),
        **_all("training.optimizer", "DeepSpeedOptimizer"),
        **_all("training.pipeline_module", "PipelineModule"),
        **_all("training.pipeline_engine", "PipelineEngine"),
        **_all("calls.logs", "logger log_dist"),
        **_all("training.construction", "OnDevice"),
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
    "accelerator.cpu_accelerator": _all("calls.device", "CPU_Accelerator"),
    "accelerator.cuda_accelerator": _all("calls.device", "CUDA_Accelerator"),
    "constants": _values(TORCH_DISTRIBUTED_DEFAULT_PORT=29500),
    "git_version_info": _VERSION
    | _all("calls.version_facts", "torch_info installed_ops compatible_ops accelerator_name"),
    "inference.engine": _all("training.answering", "InferenceEngine"),
    "launcher.runner": _all(
        "calls.launching", "parse_resource_filter fetch_hostfile _parse_hostfile main LauncherError"
    ),
    "monitor.monitor": {},
    "checkpoint": _SAVED_WORDS,
    "checkpoint.constants": _SAVED_WORDS,
    "checkpoint.utils": _all("calls.small_functions", "clone_tensors_for_torch_save"),
    "checkpointing": _CHECKPOINTING,
    "comm": _COMM,
    "comm.comm": _COMM,
    "compile.util": _all("calls.small_functions", "is_deepcompile_supported"),
    "compression.compress": _none(_COMPRESSION, "init_compression redundancy_clean student_initialization"),
    "linear": _none(
        "use torch.nn.Linear; frozen weights take no optimizer state",
        "OptimizedLinear LoRAConfig QuantizationConfig",
    ),
    "moe.experts": _none(_INSIDE_EXPERTS, "Experts"),
    "moe.layer": _all("training.experts", "MoE"),
    "moe.mappings": _none(_INSIDE_EXPERTS, "drop_tokens gather_tokens"),
    "moe.sharded_moe": _none(
        _INSIDE_EXPERTS,
        "MOELayer TopKGate top1gating top2gating topkgating gumbel_rsample multiplicative_jitter einsum _AllToAll "
        "_capacity _route_slots _sparse_encode _sparse_decode TOPK_GATE_TIMER MOE_TIMER FIRST_ALLTOALL_TIMER "
        "SECOND_ALLTOALL_TIMER",
    ),
    "moe.utils": {
        **_all(
            "training.experts",
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
    "ops.adagrad": _all("training.optimizer_classes", "DeepSpeedCPUAdagrad"),
    "ops.adam": _ADAM,
    "ops.adam.cpu_adam": _all("training.optimizer_classes", "DeepSpeedCPUAdam"),
    "ops.adam.fused_adam": _all("training.optimizer_classes", "FusedAdam"),
    "ops.lamb": _all("training.optimizer_classes", "FusedLamb"),
    "ops.lamb.fused_lamb": _all("training.optimizer_classes", "FusedLamb"),
    "ops.lion": _LION,
    "ops.lion.cpu_lion": _LION,
    "ops.lion.fused_lion": _LION,
    "ops": _all("calls.builders", "__compatible_ops__ __installed_ops__"),
    "ops.adagrad.cpu_adagrad": _all("training.optimizer_classes", "DeepSpeedCPUAdagrad"),
    "ops.op_builder": _all(
        "calls.builders",
        "OpBuilder CPUAdamBuilder FusedAdamBuilder CPUAdagradBuilder FusedLambBuilder CPULionBuilder FusedLionBuilder "
        "UtilsBuilder AsyncIOBuilder CCLCommBuilder EvoformerAttnBuilder FPQuantizerBuilder GDSBuilder "
        "InferenceBuilder InferenceCoreOpsBuilder InferenceCutlassBuilder NotImplementedBuilder PinMemoryBuilder "
        "QuantizerBuilder RaggedOpsBuilder RaggedUtilsBuilder RandomLTDBuilder ShareMemCommBuilder SparseAttnBuilder "
        "SpatialInferenceBuilder StochasticTransformerBuilder TransformerBuilder",
    ),
    "ops.aio": _all("calls.builders", "AsyncIOBuilder"),
    **_BUILDER_FILES,
    "ops.triton_ops": _all("calls.small_functions", "is_triton_available"),
    "ops.sparse_attention": _none(
        _KERNELS, "SparseSelfAttention SparsityConfig FixedSparsityConfig BigBirdSparsityConfig"
    ),
    "ops.transformer": _none(_KERNELS, "DeepSpeedTransformerLayer DeepSpeedTransformerConfig"),
    "profiling.flops_profiler": _PROFILE,
    "profiling.flops_profiler.profiler": _PROFILE,
    "runtime.activation_checkpointing.checkpointing": _CHECKPOINTING,
    "runtime.base_optimizer": _all("training.optimizer", "DeepSpeedOptimizer ZeROOptimizer"),
    "runtime.bf16_optimizer": _all("training.optimizer", "BF16_Optimizer"),
    "runtime.config": {
        **_CONFIG,
        **_all(
            "training.settings",
            "get_gradient_clipping get_log_level get_train_batch_size get_train_micro_batch_size_per_gpu "
            "get_gradient_accumulation_steps get_optimizer_name get_optimizer_params get_scheduler_name "
            "get_scheduler_params",
        ),
        **_OPTIMIZER_WORDS,
        **_values(
            TORCH_ADAM_PARAM="torch_adam",
            ADAM_W_MODE="adam_w_mode",
            ADAM_W_MODE_DEFAULT=True,
            EXPERT_PARALLEL="expert_parallel",
        ),
    },
    "runtime.config_utils": {**_CONFIG, **_all("training.config_models", "DeepSpeedConfigModel")},
    "runtime.fp16.fused_optimizer": _all("training.optimizer", "FP16_Optimizer"),
    "runtime.fp16.unfused_optimizer": _all("training.optimizer", "FP16_UnfusedOptimizer"),
    "runtime.fp16.loss_scaler": _none(
        _SCALERS, "LossScaler DynamicLossScaler LossScalerBase CreateLossScaler"
    ),
    "runtime.precision_config": _all(
        "training.config_models",
        "DeepSpeedFP16Config DeepSpeedBF16Config get_float16_config get_bfloat16_config",
    ),
    "runtime.pipe.schedule": _all(
        "training.instructions",
        "PipeSchedule InferenceSchedule TrainSchedule DataParallelSchedule PipeInstruction OptimizerStep ReduceGrads "
        "ReduceTiedGrads BufferOpInstruction LoadMicroBatch ForwardPass BackwardPass SendActivation RecvActivation "
        "SendGrad RecvGrad",
    ),
    "runtime.torch_autocast": _none(
        "torch_autocast of the configuration says what is narrow",
        "get_comm_dtype has_comm_dtype autocast_if_enabled",
    )
    | _values(PARAM_COMM_DTYPE_ATTR_NAME="comm_dtype"),
    "runtime.dataloader": _LOADERS,
    "runtime.engine": _ENGINE,
    "runtime.lr_schedules": {
        **_all(
            "training.rate_schedulers",
            "LRRangeTest OneCycle WarmupLR WarmupDecayLR WarmupCosineLR VALID_LR_SCHEDULES add_tuning_arguments",
        ),
        **_values(
            LR_RANGE_TEST="LRRangeTest",
            ONE_CYCLE="OneCycle",
            WARMUP_LR="WarmupLR",
            WARMUP_DECAY_LR="WarmupDecayLR",
            WARMUP_COSINE_LR="WarmupCosineLR",
            WARMUP_LOG_RATE="log",
            WARMUP_LINEAR_RATE="linear",
        ),
        **_words(
            "LR_SCHEDULE LR_RANGE_TEST_MIN_LR LR_RANGE_TEST_STEP_RATE LR_RANGE_TEST_STEP_SIZE LR_RANGE_TEST_STAIRCASE "
            "EDGE_VALUE MID_VALUE CYCLE_FIRST_STEP_SIZE CYCLE_FIRST_STAIR_COUNT CYCLE_SECOND_STEP_SIZE "
            "CYCLE_SECOND_STAIR_COUNT DECAY_STEP_SIZE CYCLE_MIN_LR CYCLE_MAX_LR DECAY_LR_RATE CYCLE_MIN_MOM "
            "CYCLE_MAX_MOM DECAY_MOM_RATE WARMUP_MIN_LR WARMUP_MAX_LR WARMUP_NUM_STEPS WARMUP_TYPE WARMUP_MIN_RATIO "
            "COS_MIN_RATIO TOTAL_NUM_STEPS"
        ),
    },
    "runtime.pipe.topology": _TOPOLOGY | _all("training.topology", "_prime_factors"),
    "pipe": _PIPE,
    "runtime.pipe": {**_PIPE, **_all("training.topology", "ProcessTopology")},
    "runtime.pipe.module": {**_PIPE, **_all("training.pipeline_module", "PipelineError")},
    "runtime.pipe.engine": _all("training.pipeline_engine", "PipelineEngine")
    | _all("training.pipeline_module", "PipelineError"),
    "runtime.utils": {
        **_all(
            "calls.small_functions",
            "empty_cache memory_status clip_grad_norm_ call_to_str partition_uniform partition_balanced prefix_sum_inc "
            "noop_context noop_decorator ensure_directory_exists required_torch_version",
        ),
        **_all("calls.random_streams", "set_random_seed"),
        **_all("calls.logs", "see_memory_usage"),
    },
    "runtime.zero": _PARTITIONED,
    "runtime.swap_tensor": _values(MIN_SWAPPABLE_BYTES=1 << 20),
    "runtime.swap_tensor.utils": _values(MIN_SWAPPABLE_BYTES=1 << 20, MIN_AIO_BYTES=1 << 20),
    "runtime.zero.leaf_module_config": _all("training.config_models", "DeepSpeedZeroLeafModuleConfig")
    | _values(
        DEFAULT_LEAF_MODULE_CLASSES=[],
        DEFAULT_LEAF_MODULE_NAMES=[],
        DEFAULT_LEAF_MODULE_NAME_SUFFIXES=[],
    ),
    "runtime.zero.config": {
        **_all("calls.enums", "ZeroStageEnum"),
        **_all("training.config_models", "DeepSpeedZeroConfig"),
        **_OFFLOAD_MODELS,
        **_values(ZERO_OPTIMIZATION="zero_optimization"),
    },
    "runtime.zero.offload_config": _all("calls.enums", "OffloadDeviceEnum OffloadStateTypeEnum")
    | _OFFLOAD_MODELS,
    "runtime.zero.partition_parameters": {
        **_PARTITIONED,
        **_all("training.construction", "zero_wrapper_for_fp_tensor_constructor"),
        "_orig_torch_arange": "torch:arange",
    },
    "runtime.constants": {
        **_all("calls.enums", "ValidationMode"),
        **_words(
            "TRAIN_BATCH_SIZE OPTIMIZER TYPE LEGACY_FUSION SCHEDULER MAX_GRAD_NORM ZERO_ALLOW_UNTESTED_OPTIMIZER "
            "ZERO_FORCE_DS_CPU_OPTIMIZER STEPS_PER_PRINT GRADIENT_ACCUMULATION_STEPS SPARSE_GRADIENTS FP16 AMP "
            "FP16_MASTER_WEIGHTS_AND_GRADS TORCH_AUTOCAST GRADIENT_CLIPPING COMMUNICATION_DATA_TYPE PRESCALE_GRADIENTS "
            "GRADIENT_PREDIVIDE_FACTOR GRADIENT_ALLREDUCE_OP DISABLE_ALLGATHER DUMP_STATE WALL_CLOCK_BREAKDOWN "
            "MEMORY_BREAKDOWN CHECKPOINT DATA_TYPES GRAD_ACCUM_DTYPE PARAM_DTYPE BUFFER_DTYPE DATALOADER_DROP_LAST "
            "DATA_PARALLEL_GROUP GLOBAL_RANK LOG_LEVEL"
        ),
        **_values(
            TRAIN_MICRO_BATCH_SIZE_PER_GPU="train_micro_batch_size_per_gpu",
            BFLOAT16="bf16",
            BFLOAT16_OLD="bfloat16",
            GRADIENT_CLIPPING_DEFAULT=1.0,
            LOG_LEVEL_DEFAULT=None,
            ROUTE_TRAIN="train",
            ROUTE_EVAL="eval",
            ROUTE_PREDICT="predict",
            PIPE_REPLICATED="ds_pipe_replicated",
        ),
    },
    "runtime.zero.stage3": {
        **_ESTIMATES_3,
        **_all("files.partitioned", "unwrap_model_for_generation"),
        **_all("training.optimizer", "DeepSpeedZeroOptimizer_Stage3"),
    },
    "runtime.zero.stage_1_and_2": {**_ESTIMATES_2, **_all("training.optimizer", "DeepSpeedZeroOptimizer")},
    "runtime.zero.tiling": _none(_TILES, "TiledLinear TiledLinearReturnBias"),
    "runtime.zero.utils": _all("files.fragments", "is_zero_param"),
    "sequence.layer": _none(_SEQUENCE, "DistributedAttention"),
    "runtime.sequence_parallel.ulysses_sp": {
        **_all("calls.sequences", "UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter"),
        **_none(_BY_TOKENS, "SequenceTiledCompute TiledMLP TiledFusedLogitsLoss"),
    },
    "utils": {
        **_LOGS,
        **_FRAGMENTS,
        **_LEAVES,
        **_GROUPS,
        **_all("calls.logs", "instrument_w_nvtx"),
        **_all("training.loader", "RepeatingLoader"),
        **_all("calls.small_functions", "recursive_getattr"),
        **_all("training.construction", "OnDevice"),
    },
    "utils.init_on_device": _all("training.construction", "OnDevice"),
    "utils.numa": _all("calls.launching", "parse_range_list"),
    "utils.torch": _all("calls.small_functions", "required_torch_version")
    | _none("torch.compile compiles blocks (compile: blocks)", "jit_script_compat")
    | _none("engine.backward sees every gradient; torch's own hooks work too", "register_grad_hook"),
    "utils.timer": _all("training.timers", "SynchronizedWallClockTimer"),
    "utils.groups": _GROUPS,
    "utils.logging": {**_LOGS, **_all("calls.logs", "print_dist print_rank_0 warning_once")},
    "utils.nvtx": _all("calls.logs", "instrument_w_nvtx"),
    "utils.tensor_fragment": _FRAGMENTS,
    "utils.z3_leaf_module": _LEAVES,
    "utils.zero_to_fp32": _all(
        "files.whole_states",
        "get_fp32_state_dict_from_zero_checkpoint convert_zero_checkpoint_to_fp32_state_dict "
        "load_state_dict_from_zero_checkpoint",
    ),
    "zero": {**_PARTITIONED, **_none(_TILES, "TiledLinear TiledLinearReturnBias")},
}
"""The table: the rows of each path."""

OTHERS = {"comm": "comm.default_group", "comm.comm": "comm.default_group"}
"""The module in which a path looks up names that are not in the table, such as torch.distributed's names."""
