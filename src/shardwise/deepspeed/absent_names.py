"""Names of DeepSpeed 0.19 that may be imported but are not implemented.

    AREAS     paths of which no part is implemented: every path at or below such a path imports as a module, and every
              name in the module is a refusal
    ABSENT    for the path of an implemented module, the names that it lacks

A program that imports such a name for a branch that does not run continues; a use of the name raises UsageError.
"""

from shardwise.deepspeed.names import NAMES

WHY = "a part of DeepSpeed that is not here; docs/guides/deepspeed.md says what takes its place"

AREAS = frozenset(
    f"{above}{name}"
    for above, names in {
        "": "autotuning compat compile datastates elasticity env_report inference io "
        "model_implementations nebula nvme",
        "checkpoint.": "autoep_universal autoep_zero3_metadata deepspeed_checkpoint ds_to_universal reshape_3d_utils "
        "reshape_meg_2d reshape_utils universal_checkpoint zero_checkpoint",
        "comm.": "backend ccl config constants mori reduce_op torch utils",
        "compression.": "basic_layer config constants helper scheduler utils",
        "launcher.": "constants launch launcher_helper multinode_runner",
        "linear.": "config context_manager optimized_linear quantization",
        "moe.": "ep_count ep_experts ep_kernels ep_repack ep_router ep_tp_dispatch fused_expert_layout",
        "module_inject.": "auto_ep auto_ep_config auto_ep_folding auto_ep_layer auto_ep_preset_adapters "
        "auto_ep_presets auto_tp auto_tp_model_utils autotp_config containers fusedqkv_utils inject layers "
        "load_checkpoint module_quantize policy replace_module replace_policy tp_plan_converter tp_shard utils",
        "monitor.": "comet config csv_monitor tensorboard utils wandb",
        "ops.": "aio compile deepspeed4science fp_quantizer gds pin_memory quantizer random_ltd triton_ops",
        "ops.adam.": "multi_tensor_apply zenflow_cpu_adam zenflow_torch_adam",
        "ops.lion.": "multi_tensor_apply",
        "ops.op_builder.": "all_ops builder ccl_comm npu xpu",
        "ops.sparse_attention.": "bert_sparse_self_attention matmul softmax sparse_attention_utils "
        "sparse_self_attention sparsity_config",
        "ops.transformer.": "inference transformer",
        "profiling.": "config constants",
        "runtime.": "checkpoint_engine comm compiler compression data_pipeline domino eigenvalue hybrid_engine "
        "hybrid_engine_graph model_checkpointing progressive_layer_drop quantize rollout sparse_tensor "
        "state_dict_factory superoffload swap_tensor tensor_parallel weight_quantizer zenflow",
        "runtime.activation_checkpointing.": "config offload_activations",
        "runtime.fp16.": "onebit",
        "runtime.pipe.": "p2p",
        "runtime.sequence_parallel.": "parallel_state_sp",
        "runtime.zero.": "contiguous_memory_allocator leaf_module_config linear mics mics_utils muon offload_states "
        "parameter_offload partitioned_param_coordinator partitioned_param_profiler",
        "sequence.": "auto_sp autosp_detector autosp_fusion autosp_vit cross_entropy fpdt_layer",
        "utils.": "bwc comms_logging config debug exceptions mixed_precision_linkage pin_memory pin_memory_tracker "
        "static_cache types",
    }.items()
    for name in names.split()
)
"""The paths of which no part is implemented."""

_WORDS = {
    "": "default_inference_config domino is_compile_supported set_optimizer_flags DeepSpeedInferenceConfig "
    "record_tp_model_init_args merge_tp_model_init_into_config",
    "checkpoint": "DeepSpeedCheckpoint SubparamShape ZeROCheckpoint enable_universal_checkpoint "
    "get_layer_ckpt_name_for_rank get_model_3d_descriptor get_model_ckpt_name_for_rank get_zero_ckpt_name_for_rank "
    "merge_state model_3d_desc reshape_meg_2d_parallel",
    "checkpoint.utils": "get_layer_ckpt_name_for_rank get_model_ckpt_name_for_rank get_zero_ckpt_name_for_rank",
    "compression": "compression_scheduler convert_conv1d_to_linear init_compression redundancy_clean",
    "compression.compress": "check_deepspeed_config get_compress_methods get_module_name",
    "launcher.runner": "encode_world_info parse_args",
    "linear": "Init init_lora",
    "module_inject": "AutoTPConfig AutoTPPresets EmbeddingLayer GroupQuantizer LinearAllreduce LinearLayer Normalize "
    "PartitionType ReplaceWithTensorSlicing SubParamLinearAllreduce SubParamLinearLayer TPLayerSpec generic_injection "
    "merge_autotp_configs quantize_transformer_layer revert_transformer_layer set_autotp_mode",
    "monitor.monitor": "Monitor MonitorMaster",
    "ops.adam": "ZenFlowCPUAdam ZenFlowSelectiveAdamW ZenFlowSelectiveAdamW_stage3",
    "ops.sparse_attention": "BSLongformerSparsityConfig BertSparseSelfAttention DenseSparsityConfig "
    "LocalSlidingWindowSparsityConfig SparseAttentionUtils VariableSparsityConfig",
    "ops.transformer": "DeepSpeedInferenceConfig DeepSpeedMoEInference DeepSpeedMoEInferenceConfig "
    "DeepSpeedTransformerInference",
    "runtime.activation_checkpointing.checkpointing": "CheckpointFunction detach_variable extract_tensors "
    "gather_partitioned_activations get_cpu_activations_for_backward get_partition_size get_partition_start "
    "get_partitioned_activations_for_backward is_activation_to_checkpoint merge_tensors",
    "runtime.base_optimizer": "BackwardHookStateManager",
    "runtime.config": "DeepSpeedConfigWriter DtypeEnum HybridEngineConfig get_amp_enabled get_amp_params "
    "get_checkpoint_params get_data_types_params get_gradient_accumulation_steps get_optimizer_gradient_clipping "
    "get_optimizer_name get_optimizer_params get_pipeline_config get_pld_enabled get_pld_params get_scheduler_name "
    "get_scheduler_params get_sparse_attention get_train_batch_size get_train_micro_batch_size_per_gpu",
    "runtime.config_utils": "DeepSpeedConfigObject ScientificNotationEncoder dict_raise_error_on_duplicate_keys "
    "get_config_default get_dict_param get_list_param get_scalar_param pp_int",
    "runtime.engine": "_checkpoint_parallel_metadata _eigenvalue_summary_events "
    "EngineTimers split_half_float_double_sparse",
    "runtime.lr_schedules": "get_config_from_args get_lr_from_config get_torch_optimizer override_1cycle_params "
    "override_lr_range_test_params override_params override_warmupLR_params parse_arguments update_lr",
    "runtime.pipe.engine": "is_even mem_alloced mem_cached",
    "runtime.sequence_parallel.ulysses_sp": "AutogradComputeMLP TiledLoss UlyssesSPFwdLossBwdWithLogits "
    "sequence_tiled_compute",
    "runtime.utils": "CheckOverflow DummyOptim OutputBackwardHookManager PartitionedTensor TLinear "
    "align_dense_tensors all_gather_dp_groups all_gather_into_tensor_dp_groups clip_tensors_by_global_norm "
    "compare_tensors_in_structures copy_to_device count_used_parameters_in_backward get_checkpoint_folder_size "
    "get_flattened_grad_norm get_global_norm get_global_norm_of_tensors get_grad_zeros get_inactive_params "
    "get_ma_status get_norm_with_moe_layers get_tensor_bytes get_weight_norm graph_cache graph_process "
    "is_model_parallel_parameter is_transformers_cache mask_nan_or_inf_with_val_inplace maybe_loss_for_backward "
    "mem_alloced mem_cached move_to_device offload_adam_states register_output_backward_hooks reload_adam_states",
    "runtime.zero": "DeepSpeedTensorOverride DeepSpeedZeRoOffload",
    "runtime.zero.config": "get_zero_config read_zero_config_deprecated",
    "runtime.zero.partition_parameters": "AllGatherCoalescedHandle AllGatherHandle AllReduceCoalescedHandle "
    "_contradicting_single_rank_pg_error zero3_linear_wrap "
    "CUDAQuantizer DeepSpeedTensorOverride InsertPostInitMethodToModuleSubClasses MultipleAllGatherHandles "
    "NoGatherCoalescedHandle NoGatherHandle QuantizationInfo free_param get_all_subclasses get_allgather_dtype "
    "get_new_tensor_fn_for_dtype partitioned_param_data_shape restore_init_context shutdown_init_context",
    "runtime.zero.stage3": "IPGBucketZ3 estimate_zero3_model_states_mem_needs model_to_params",
    "runtime.zero.stage_1_and_2": "IPGBucket estimate_zero2_model_states_mem_needs get_alignment_padding "
    "model_to_params split_half_float_double",
    "runtime.zero.utils": "ZERO_SUPPORTED_OPTIMIZERS ZeRORuntimeException apply_to_tensors_only "
    "assert_ints_same_as_other_ranks assert_lst_len_same_as_other_ranks defragment get_lst_from_rank0 "
    "get_mapping_to_flat_buffer is_builtin_type is_zero_supported_optimizer isinstance_namedtuple",
    "sequence": "InternVLFusionAdapter LlavaFusionAdapter ModalityFusionSPAdapter Qwen2VLFusionAdapter SPModelInfo "
    "UlyssesSPViTAttention auto_wrap_model_for_sp detect_model_sp_info",
    "sequence.layer": "apply_rotary_pos_emb post_all2all pre_all2all_fun single_all_to_all uneven_heads_all2all "
    "_SeqAllToAll _rotate_half _torchembed_available",
    "utils": "fragment_address get_caller_func get_full_hp_grad get_full_hp_param get_hp_fragment_mapping "
    "get_numactl_cmd link_hp_params map_to_flat_opt_states set_full_hp_grad set_full_hp_param z3_leaf_parameter",
    "utils.groups": "expert_tensor_parallel_world_size initialize _create_expert_and_data_parallel "
    "_create_expert_data_and_model_parallel _create_model_parallel _clone_world_group _get_local_all_to_all_group "
    "_get_expert_parallel_group_dict _get_expert_data_parallel_group_dict _get_broadcast_src_rank "
    "_get_expert_broadcast_src_rank _create_zero_param_parallel_group _get_zero_param_intra_parallel_group "
    "_get_sequence_data_parallel_group_name",
    "utils.logging": "LoggerFactory get_current_level get_dist_msg print_configuration print_json_dist should_log_le",
    "utils.nvtx": "enable_nvtx",
    "utils.tensor_fragment": "fragment_address get_full_hp_grad get_full_hp_param get_hp_fragment_mapping "
    "map_to_flat_opt_states set_full_hp_grad set_full_hp_param tensor_fragment",
    "utils.timer": "CudaEventTimer NoopTimer ThroughputTimer trim_mean",
    "utils.z3_leaf_module": "apply_zero_leaf_module_config z3_leaf_parameter",
    "utils.zero_to_fp32": "GatheredTensor get_checkpoint_files get_model_state_file get_model_state_files "
    "_raise_if_autoep_zero3_partitioned_checkpoint "
    "get_optim_files parse_model_states parse_optim_states to_torch_tensor",
}
ABSENT = {path: frozenset(words.split()) - NAMES.get(path, {}).keys() for path, words in _WORDS.items()}
"""The names that are not implemented, for the path of each module."""


def is_absent(path: str) -> bool:
    """Return True if DeepSpeed has the module at ``path``, or a module around it, and no part of it is implemented."""
    steps = path.split(".")
    return any(".".join(steps[:count]) in AREAS for count in range(1, len(steps) + 1))
