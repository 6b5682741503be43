"""The table of every key of a DeepSpeed configuration, with its effect in Shardwise.

    does       the key has an effect; ``ours`` names the Shardwise key that it sets
    idle       a valid value has no effect, for the reason given
    refused    any value but the default is an error that names a replacement

The keys are those that DeepSpeed 0.19.6 and 0.19.8 read, older names that both still accept, and the fourteen keys
that 0.19.8 removed. ``config/deepspeed.py`` translates by this table, and docs/deepspeed.md is generated from it.
``config/deepspeed_rows.py`` documents the notation of the rows.
"""

from shardwise.config.deepspeed_rows import REQUIRED, DeepSpeedKey, block, does, idle, of, old, refused

# Reasons that many rows share --------------------------------------------------------------------------------------

FLAT = "gradients and weights of a Unit lie in flat buffers from the start"
BUCKETS = "what travels together is a Unit (zero.units), not a number of elements"
LIVE = (
    "a Unit's weights are freed when its pass is over; zero.units and zero.prefetch_bytes decide what is live"
)
COPY_ONLY = "how DeepSpeed copies between host and device; the numbers do not depend on it"
PLAIN = "DeepSpeed's own means to one end; the Plan reaches it without a switch"
PINNED = (
    "host memory that copies pass through is pinned beside an accelerator; the numbers do not depend on it"
)
OVERLAPPED = "state is read ahead of updates and written behind them in any case (offload.buffers)"
IN_WINDOWS = (
    "a Unit's weights are read into the slot that it computes in; zero.prefetch_bytes says how far ahead"
)
SAVES = "every rank writes its share behind training, and a step is committed when all of it is on disk (checkpoint)"
WITH_BLOCK = "belongs to its block"
NOT_TUNED = "no jobs are started to try settings; shardwise train --check says the bytes of a layout"
COMPILER = "a switch inside DeepCompile; compile: blocks compiles the forward of every Unit"
EXPERTS_FOUND = "experts are found by the form of their stacks; the rest of a block is the model's own"
EXPERTS_RUN = "how DeepSpeed computes and sends; the numbers do not depend on it"
EXPERTS_ROUTED = "leave it out: the router is the model's own; set it in the model's configuration"

_ZERO = block(
    does("zero_optimization", "block", {}, "zero"),
    does("stage", "int >= 0 <= 3", 0, "zero.stage"),
    idle("contiguous_gradients", "bool", True, FLAT),
    idle("reduce_scatter", "bool", True, "the collective follows from the stage"),
    idle("reduce_bucket_size", "int >= 0", 500_000_000, BUCKETS),
    idle("use_multi_rank_bucket_allreduce", "bool", True, BUCKETS),
    idle("allgather_partitions", "bool", True, "the collective follows from the stage"),
    idle("allgather_bucket_size", "int >= 0", 500_000_000, BUCKETS),
    does("overlap_comm", "bool?", None, "zero.reductions_under_way: 0 for false, else auto"),
    idle(
        "compute_grad_norm",
        "bool",
        True,
        "the norm costs one small sum and tells a non-finite step from a good one",
    ),
    idle("load_from_fp32_weights", "bool", True, "masters are saved in fp32 and loaded from it"),
    idle("elastic_checkpoint", "bool", False, "every checkpoint loads on any number of ranks"),
    block(
        does("offload_param", "block?", None, "offload.parameters"),
        does(
            "device",
            "one of none|cpu|nvme",
            "none",
            "offload.parameters: host for cpu, disk for nvme; masters and moments lie there too, and weights on the "
            "disk where offload_optimizer says nvme",
        ),
        does("nvme_path", "text?", None, "offload.disk_path; of nvme, and the same in both blocks"),
        idle("buffer_count", "int >= 0", 5, IN_WINDOWS),
        idle("buffer_size", "int >= 0", 100_000_000, IN_WINDOWS),
        idle("max_in_cpu", "int >= 0", 1_000_000_000, IN_WINDOWS),
        idle("pin_memory", "bool", True, PINNED),
    ),
    block(
        does("offload_optimizer", "block?", None, "offload.optimizer"),
        does(
            "device",
            "one of none|cpu|nvme",
            "none",
            "offload.optimizer: host for cpu, disk for nvme; at every stage",
        ),
        does("nvme_path", "text?", None, "offload.disk_path; of nvme, and the same in both blocks"),
        does(
            "buffer_count",
            "int >= 0",
            4,
            "offload.buffers; of nvme: a quarter of it, rounded up, at least 1, since 4 of theirs (weight, gradient, "
            "two moments) hold one piece and each of ours a whole Unit; the default: 2",
        ),
        idle("pin_memory", "bool", True, PINNED),
        idle("pipeline_read", "bool", False, OVERLAPPED),
        idle("pipeline_write", "bool", False, OVERLAPPED),
        idle(
            "fast_init",
            "bool",
            False,
            "the files are reserved whole, and written once when the engine is built",
        ),
        does(
            "ratio",
            "num >= 0 <= 1",
            1.0,
            "offload.fraction; the first Units stay, as there; 0: none moves; refused beside offload_param",
        ),
        idle(
            "super_offload",
            "bool",
            False,
            "updates run beside the next forward pass in any case, after the norm is known, so nothing is rolled back",
        ),
        idle("cpuadam_cores_perc", "num >= 0 <= 1", 0.8, "threads of a rank are torch's (OMP_NUM_THREADS)"),
    ),
    block(
        refused(
            "zenflow",
            "block?",
            None,
            "every step updates all weights, or all of them one step late (offload.step: delayed); leave the block out",
        ),
        refused("topk_ratio", "num > 0 < 1", 0.1, WITH_BLOCK),
        refused("select_strategy", "one of auto|step|epoch", "auto", WITH_BLOCK),
        refused("select_interval", "any", "auto", WITH_BLOCK),
        refused("update_interval", "any", "auto", WITH_BLOCK),
        refused("overlap_step", "bool", False, WITH_BLOCK),
        refused("offload", "bool", False, WITH_BLOCK),
        refused("auto_ratio", "num >= 0 <= 1", 0.99, WITH_BLOCK),
        refused("full_warm_up_rounds", "int", 0, WITH_BLOCK),
        refused("pt_reserved_cores_perc", "num >= 0 <= 1", 0.5, WITH_BLOCK),
        refused("steps_per_epoch", "int?", None, WITH_BLOCK),
    ),
    idle("sub_group_size", "int >= 0", 1_000_000_000, "the optimizer steps Unit by Unit"),
    does(
        "cpu_offload_param",
        "bool?",
        None,
        "offload.parameters; an older form of offload_param: {device: cpu}",
    ),
    does(
        "cpu_offload_params",
        "bool?",
        None,
        "offload.parameters; an older form of offload_param: {device: cpu}",
    ),
    does(
        "cpu_offload", "bool?", None, "offload.optimizer; an older form of offload_optimizer: {device: cpu}"
    ),
    idle("cpu_offload_use_pin_memory", "bool?", None, COPY_ONLY),
    does(
        "stage3_prefetch_bucket_size",
        "int >= 0",
        50_000_000,
        "zero.prefetch_bytes: so many weights, of 2 or 4 bytes each; at least one Unit, but for 0; the default: auto",
    ),
    old("prefetch_bucket_size", "int >= 0", "stage3_prefetch_bucket_size"),
    idle(
        "stage3_param_persistence_threshold",
        "int >= 0",
        100_000,
        "small weights travel with their Unit, at no extra message",
    ),
    old("param_persistence_threshold", "int >= 0", "stage3_param_persistence_threshold"),
    idle(
        "stage3_model_persistence_threshold",
        "int >= 0",
        2**63 - 1,
        "small weights travel with their Unit, at no extra message",
    ),
    old("model_persistence_threshold", "int >= 0", "stage3_model_persistence_threshold"),
    idle("stage3_max_live_parameters", "int >= 0", 1_000_000_000, LIVE),
    old("max_live_parameters", "int >= 0", "stage3_max_live_parameters"),
    idle("stage3_max_reuse_distance", "int >= 0", 1_000_000_000, LIVE),
    old("max_reuse_distance", "int >= 0", "stage3_max_reuse_distance"),
    idle(
        "stage3_gather_16bit_weights_on_model_save",
        "bool",
        False,
        "saving gathers what it writes, at every stage",
    ),
    old("gather_16bit_weights_on_model_save", "bool", "stage3_gather_16bit_weights_on_model_save"),
    old("stage3_gather_fp16_weights_on_model_save", "bool", "stage3_gather_16bit_weights_on_model_save"),
    idle("stage3_module_granularity_threshold", "int", 0, LIVE),
    old("module_granularity_threshold", "int", "stage3_module_granularity_threshold"),
    idle(
        "stage3_use_all_reduce_for_fetch_params",
        "bool",
        False,
        "a Unit is gathered from one flat buffer into another",
    ),
    old("use_all_reduce_for_fetch_params", "bool", "stage3_use_all_reduce_for_fetch_params"),
    idle(
        "stage3_allgather_sequential", "bool", False, "a Unit is gathered from one flat buffer into another"
    ),
    old("allgather_sequential", "bool", "stage3_allgather_sequential"),
    idle(
        "ignore_unused_parameters",
        "bool",
        True,
        "parameters that no rank used are skipped by the optimizer, as in torch",
    ),
    idle("legacy_stage1", "bool", False, PLAIN),
    idle("round_robin_gradients", "bool", False, FLAT),
    idle("parameter_alignment", "bool", False, "parameters start at 64 bytes in any case"),
    idle(
        "zero_hpz_partition_size",
        "int >= 0",
        1,
        "a second copy of the weights for the gathers of a backward pass, which changes no number; mics_shard_size: N "
        "keeps the state whole in N ranks",
    ),
    refused("zero_quantized_weights", "bool", False, "weights travel in precision.compute; leave it out"),
    refused(
        "zero_quantized_nontrainable_weights",
        "bool",
        False,
        "weights travel in precision.compute; leave it out",
    ),
    refused("zero_quantized_gradients", "bool", False, "communication_data_type: bf16 or fp16"),
    block(
        refused("zeropp_loco_param", "block?", None, "gradients are not quantised; leave the block out"),
        refused("err_beta", "num", 0.8, WITH_BLOCK),
        refused("reset_T", "int", 1024, WITH_BLOCK),
    ),
    does("mics_shard_size", "int", -1, "mesh.dp: {replicate: ranks / N, shard: N} for N above 0"),
    idle("mics_hierarchical_params_gather", "bool", False, "the transport picks how a gather goes"),
    idle("memory_efficient_linear", "bool", True, "gathered weights are not kept for the backward pass"),
    idle("pipeline_loading_checkpoint", "bool", False, "every rank reads only the slices that it holds"),
    idle(
        "override_module_apply",
        "bool",
        True,
        "a model on meta gets its weights shard by shard; torch stays as it is",
    ),
    idle("log_trace_cache_warnings", "bool", False, "the order of gathers is planned before the first step"),
    idle(
        "enable_sanity_checks",
        "bool",
        False,
        "a stale weight is an error in any case; zero.debug fills freed memory",
    ),
    idle(
        "save_muon_momentum_buffer_in_memory",
        "bool",
        False,
        "Muon looks at whole matrices, so its state stays where the model computes",
    ),
    idle("grad_hooks", "bool", True, PLAIN),
    block(
        idle(
            "leaf_module", "block?", {}, "a Unit is gathered as a whole, whatever its forward pass then uses"
        ),
        idle("classes", "texts", [], "a Unit is gathered as a whole, whatever its forward pass then uses"),
        idle("names", "texts", [], "a Unit is gathered as a whole, whatever its forward pass then uses"),
        idle(
            "name_suffixes", "texts", [], "a Unit is gathered as a whole, whatever its forward pass then uses"
        ),
    ),
)

_OF_FP16 = "a key of fp16; bf16 has the range of fp32 and no loss scale"
_PRECISION = [
    *block(
        does("fp16", "block", {}, "precision"),
        does("enabled", "bool", False, "precision.compute: fp16"),
        idle("auto_cast", "bool", False, "floating inputs are cast at the root of the model in any case"),
        does("loss_scale", "num >= 0", 0.0, "precision.loss_scale; above 0 a scale that stays"),
        does(
            "initial_scale_power", "int >= 0 <= 100", 16, "precision.loss_scale.init_scale: 2 to that power"
        ),
        does("loss_scale_window", "int > 0", 1000, "precision.loss_scale.growth_interval"),
        does("hysteresis", "int > 0", 2, "precision.loss_scale.hysteresis"),
        does("consecutive_hysteresis", "bool", False, "precision.loss_scale.consecutive_hysteresis"),
        does("min_loss_scale", "num > 0", 1, "precision.loss_scale.min_scale"),
        does("fp16_master_weights_and_grads", "bool", False, "precision.master and grad: fp16"),
    ),
    *block(
        does("bf16", "block", {}, "precision"),
        does("enabled", "bool", False, "precision.compute: bf16"),
        idle("immediate_grad_update", "bool", False, "gradients go into the buffer as they come"),
        does("check_grad_overflow", "bool", True, "precision.nonfinite: skip where it is true, else raise"),
        does("bf16_master_weights_and_grads", "bool", False, "precision.master and grad: bf16"),
        idle("bf16_optimizer_states", "bool", False, "moments have the dtype of the masters"),
        idle("auto_cast", "bool", False, _OF_FP16),
        idle("loss_scale", "num >= 0", 0.0, _OF_FP16),
        idle("initial_scale_power", "num >= 0", 16, _OF_FP16),
        idle("loss_scale_window", "num >= 0", 1000, _OF_FP16),
        idle("hysteresis", "num >= 0", 2, _OF_FP16),
        idle("min_loss_scale", "num >= 0", 1, _OF_FP16),
    ),
    DeepSpeedKey("bfloat16", "block", None, "does", "an older name of bf16", stands_for="bf16"),
    *block(
        does("amp", "block", {}, "precision.amp"),
        does("enabled", "bool", False, "precision.amp"),
        does("opt_level", "one of O0|O1|O2|O3", "O1", "precision.amp"),
        does(
            "loss_scale", "any", None, "precision.loss_scale; dynamic, or a number that stays; of O1 and O2"
        ),
        does("min_loss_scale", "num > 0?", None, "precision.loss_scale.min_scale"),
        idle("max_loss_scale", "num", 2.0**24, "a scale that is too large falls by itself"),
        refused("cast_model_type", "text?", None, "opt_level"),
        refused("patch_torch_functions", "bool?", None, "opt_level"),
        refused("keep_batchnorm_fp32", "any", None, "opt_level: O2, which does so"),
        refused("master_weights", "bool?", None, "opt_level: O2, which does so"),
        refused("cast_model_outputs", "text?", None, "a loss that casts what it needs"),
        idle("num_losses", "int > 0", 1, "all losses of a step have one scale"),
        idle("verbosity", "int", 1, "what was chosen is in engine.config"),
    ),
    *block(
        does("torch_autocast", "block", {}, "precision.operations"),
        does("enabled", "bool", False, "precision.operations"),
        does("dtype", "dtype?", None, "precision.operations; bf16 if left out"),
        does(
            "lower_precision_safe_modules",
            "texts?",
            None,
            "precision.narrow_reduce: by class; torch's linear and conv",
        ),
    ),
    *block(
        does("data_types", "block", {}, "precision"),
        does("grad_accum_dtype", "dtype?", None, "precision.grad"),
        does("param_dtype", "dtype?", None, "precision.compute, where fp16 and bf16 are off"),
        does("buffer_dtype", "dtype?", None, "precision.buffers"),
        does("keep_in_fp32_modules", "any", "auto", "precision.keep_fp32; of weights and buffers"),
    ),
    does("communication_data_type", "dtype?", None, "precision.reduce"),
    idle(
        "seq_parallel_communication_data_type",
        "dtype?",
        "fp32",
        "sequences are not cut over ranks yet",
    ),
]

_ADAM = "adam adamw"
_TORCH = "sgd rmsprop adadelta adamax nadam radam asgd rprop"
_BETAS = f"{_ADAM} lamb adamax nadam radam muon"
_DECAYED = f"{_ADAM} lamb lion adagrad muon sgd rmsprop adadelta adamax nadam radam asgd"
_ONE_BIT = "onebitadam zerooneadam onebitlamb"
ONE_BIT_TYPES = tuple(_ONE_BIT.split())
"""Optimizers that are refused together with all of their parameters."""
_OPTIMIZER = block(
    does("optimizer", "block?", None, "optimizer"),
    does("type", "text", REQUIRED, "optimizer.type; Adam is AdamW unless adam_w_mode is false"),
    idle("legacy_fusion", "bool", False, PLAIN),
    block(
        does("params", "block", {}, "optimizer"),
        of(f"{_ADAM} lamb lion sgd radam {_ONE_BIT}", does("lr", "num >= 0", 1e-3, "optimizer.lr")),
        of("adagrad rmsprop asgd rprop", does("lr", "num >= 0", 1e-2, "optimizer.lr")),
        of("adamax nadam", does("lr", "num >= 0", 2e-3, "optimizer.lr")),
        of("adadelta", does("lr", "num >= 0", 1.0, "optimizer.lr")),
        of("muon", does("lr", "num >= 0", 0.02, "optimizer.lr; of all parameters")),
        of(_DECAYED, does("weight_decay", "num >= 0", 0.0, "optimizer.weight_decay")),
        of(_BETAS, does("betas", "decays", [0.9, 0.999], "optimizer.betas")),
        of("lion", does("betas", "decays", [0.9, 0.999], "optimizer.betas")),
        of(f"{_BETAS} rmsprop", does("eps", "num > 0", 1e-8, "optimizer.eps")),
        of("adagrad", does("eps", "num > 0", 1e-10, "optimizer.eps")),
        of("adadelta", does("eps", "num > 0", 1e-6, "optimizer.eps")),
        of(
            _ADAM,
            does("adam_w_mode", "bool", True, "optimizer.type: adam where it is false and the type is Adam"),
            does(
                "torch_adam",
                "bool",
                False,
                "optimizer.weight_decay: 0.01 if left out, as torch's AdamW has it",
            ),
            does("amsgrad", "bool", False, "optimizer.amsgrad"),
            does("bias_correction", "bool", True, "optimizer.correct: none where it is false"),
            idle("capturable", "bool", False, PLAIN),
            idle("adamw_mode", "bool", True, "adam_w_mode decides"),
        ),
        of(
            "lamb",
            does("max_coeff", "num > 0", 10.0, "optimizer.trust_bounds"),
            does("min_coeff", "num >= 0", 0.01, "optimizer.trust_bounds"),
            does(
                "bias_correction",
                "bool",
                True,
                "optimizer.correct: step, as their kernel; none where it is false",
            ),
            refused("eps_inside_sqrt", "bool", False, "leave it out"),
            refused("amsgrad", "bool", False, "leave it out"),
        ),
        of("adagrad", refused("amsgrad", "bool", False, "leave it out")),
        of(
            f"{_ADAM} lion adagrad",
            idle("fp32_optimizer_states", "bool", True, "moments have the masters' dtype"),
        ),
        of(
            f"{_ADAM} lion",
            idle("set_grad_none", "bool", True, "gradients leave the parameters as they come"),
        ),
        of(
            "muon",
            does("momentum", "num >= 0", 0.95, "optimizer.momentum"),
            does("muon_lr", "num >= 0?", None, "optimizer.lr; of matrices"),
            does("adam_lr", "num >= 0?", None, "optimizer.rest_lr"),
            idle("ns_method", "one of gram|standard", "gram", "the standard rounds, which mean the same"),
            idle("adam_w_mode", "bool", True, "the rest has AdamW"),
            idle("torch_adam", "bool", False, PLAIN),
        ),
        of("sgd rmsprop", does("momentum", "num >= 0", 0.0, "optimizer.momentum")),
        of(
            "sgd",
            does("nesterov", "bool", False, "optimizer.nesterov"),
            does("dampening", "num >= 0", 0.0, "optimizer.dampening"),
        ),
        of(
            "rmsprop",
            does("alpha", "num >= 0", 0.99, "optimizer.alpha"),
            does("centered", "bool", False, "optimizer.centered"),
        ),
        of(
            "adagrad",
            does("lr_decay", "num >= 0", 0.0, "optimizer.lr_decay"),
            does("initial_accumulator_value", "num >= 0", 0.0, "optimizer.initial_accumulator_value"),
        ),
        of("adadelta", does("rho", "num >= 0 <= 1", 0.9, "optimizer.rho")),
        of("nadam", does("momentum_decay", "num >= 0", 4e-3, "optimizer.momentum_decay")),
        of("nadam radam", does("decoupled_weight_decay", "bool", False, "optimizer.decoupled_weight_decay")),
        of(
            "asgd",
            does("lambd", "num >= 0", 1e-4, "optimizer.lambd"),
            does("alpha", "num >= 0", 0.75, "optimizer.alpha"),
            does("t0", "num > 0", 1e6, "optimizer.t0"),
        ),
        of(
            "rprop",
            does("etas", "pair", [0.5, 1.2], "optimizer.etas"),
            does("step_sizes", "pair", [1e-6, 50.0], "optimizer.step_sizes"),
        ),
        of(
            f"{_ADAM} adagrad {_TORCH}",
            refused("maximize", "bool", False, "the loss with its sign turned"),
            idle("foreach", "bool?", None, PLAIN),
            idle("fused", "bool?", None, PLAIN),
            idle("differentiable", "bool", False, "a step is not differentiated"),
        ),
        of(
            _ONE_BIT,
            *(
                refused(name, kind, default, "Adam or Lamb without it")
                for name, kind, default in (
                    ("freeze_step", "int", 100_000),
                    ("cuda_aware", "bool", False),
                    ("comm_backend_name", "text", "nccl"),
                    ("coeff_beta", "num", 0.9),
                    ("factor_max", "num", 4.0),
                    ("factor_min", "num", 0.5),
                    ("factor_threshold", "num", 0.1),
                    ("var_freeze_step", "int", 100_000),
                    ("var_update_scaler", "int", 16),
                    ("local_step_scaler", "int", 32_678),
                    ("local_step_clipper", "int", 16),
                )
            ),
        ),
        refused("max_grad_norm", "num", 0.0, "gradient_clipping"),
    ),
)

_WARMUP = "WarmupLR WarmupDecayLR WarmupCosineLR"
_SCHEDULER = block(
    does("scheduler", "block?", None, "schedule"),
    does("type", "text", REQUIRED, "schedule.type; any class of torch.optim.lr_scheduler too"),
    block(
        does("params", "block", {}, "schedule"),
        refused("last_batch_iteration", "int", -1, "a checkpoint, which has the place of the schedule"),
        of(
            "LRRangeTest",
            does("lr_range_test_min_lr", "rates", 1e-3, "schedule.min_lr"),
            does("lr_range_test_step_size", "int > 0", 2000, "schedule.interval_steps"),
            does("lr_range_test_step_rate", "num > 0", 1.0, "schedule.rate"),
            does("lr_range_test_staircase", "bool", False, "schedule.staircase"),
        ),
        of(
            "OneCycle",
            does("cycle_min_lr", "rates", REQUIRED, "schedule.min_lr"),
            does("cycle_max_lr", "rates", REQUIRED, "schedule.max_lr"),
            does("decay_lr_rate", "num >= 0", 0.0, "schedule.decay_lr_rate"),
            does("cycle_first_step_size", "int > 0", 2000, "schedule.rise_steps"),
            does("cycle_second_step_size", "int > 0?", None, "schedule.fall_steps"),
            does("cycle_first_stair_count", "int >= 0", 0, "schedule.rise_stairs"),
            does("cycle_second_stair_count", "int >= 0?", None, "schedule.fall_stairs"),
            does("decay_step_size", "int >= 0", 0, "schedule.decay_steps"),
            does(
                "cycle_momentum", "bool", True, "schedule.cycle_momentum; not of an optimizer without betas"
            ),
            does("cycle_min_mom", "rates", 0.8, "schedule.min_momentum"),
            does("cycle_max_mom", "rates", 0.9, "schedule.max_momentum"),
            does("decay_mom_rate", "num >= 0", 0.0, "schedule.decay_momentum_rate"),
        ),
        of(
            _WARMUP,
            does("warmup_num_steps", "int > 0", 1000, "schedule.warmup_steps"),
            does(
                "warmup_type",
                "one of log|linear|cosine",
                "log",
                "schedule.rise; DeepSpeed itself takes log for cosine, with a warning",
            ),
        ),
        of("WarmupLR WarmupDecayLR", does("warmup_min_lr", "rates", 0.0, "schedule.min_lr")),
        of("WarmupLR", does("warmup_max_lr", "rates?", None, "schedule.max_lr; left out, the optimizer's")),
        of("WarmupDecayLR", does("warmup_max_lr", "rates", 1e-3, "schedule.max_lr")),
        of(
            "WarmupDecayLR WarmupCosineLR",
            does("total_num_steps", "int > 0", REQUIRED, "schedule.total_steps"),
        ),
        of(
            "WarmupCosineLR",
            does("warmup_min_ratio", "num >= 0", 0.0, "schedule.start_ratio"),
            does("cos_min_ratio", "num >= 0", 1e-4, "schedule.min_ratio"),
        ),
    ),
)

_RECOMPUTED = "recompute: full where it is true"
_MEMORY = [
    *block(
        does(
            "activation_checkpointing",
            "block",
            {},
            "recompute: the model's blocks, with no call in the model",
        ),
        does(
            "partition_activations",
            "bool",
            False,
            f"{_RECOMPUTED}; along tp a block keeps this rank's share of its input where tensor.sequence_parallel cuts "
            "the sequence (the default), and beside cpu_checkpointing in any case",
        ),
        does("cpu_checkpointing", "bool", False, f"{_RECOMPUTED}; offload.activations: host"),
        does("contiguous_memory_optimization", "bool", False, _RECOMPUTED),
        does("number_checkpoints", "amount?", None, "recompute: full where it is given"),
        idle("synchronize_checkpoint_boundary", "bool", False, "nothing has to wait there"),
        idle("profile", "bool", False, "shardwise train --profile N traces whole steps"),
    ),
    *block(
        does("pipeline", "block", {}, "pipeline, mesh.pp"),
        does("stages", "any", "auto", "mesh.pp; auto: what the PipelineModule says"),
        does(
            "partition",
            "text",
            "best",
            "pipeline.partition: best and parameters are parameters; uniform; type:REGEX",
        ),
        idle(
            "seed_layers",
            "bool",
            False,
            "start weights follow from the seed and the tensor's name on any layout",
        ),
        does("activation_checkpoint_interval", "int >= 0", 0, "recompute: full above 0"),
        idle("pipe_partitioned", "bool", True, "what travels between stages follows from the layout"),
        idle("grad_partitioned", "bool", True, "what travels between stages follows from the layout"),
        idle("use_reentrant", "bool", True, "recomputation is torch's non-reentrant one"),
    ),
]

_AIO = "a few threads read and write whole blocks past the page cache; the numbers do not depend on it"
_OLD_COMPILE = (
    "a switch of DeepSpeed 0.14 for torch.compile, which 0.19 does not read; deepcompile: true compiles"
)
_PARALLEL = [
    *block(
        does("tensor_parallel", "block", {}, "mesh.tp"),
        does("autotp_size", "int >= 0", 0, "mesh.tp"),
        idle("dtype", "any", "fp16", "fp16 and bf16 say the dtype"),
        idle("tp_overlap_comm", "bool", False, "collectives run beside the computation where the device can"),
        idle("vocab_parallel_lm_head", "bool?", None, "the model's table says how its head is cut"),
        refused("vocab_parallel_ce_backend", "one of torch|liger", "torch", "leave it out"),
        block(
            does("tp", "block", {}, "mesh.tp"),
            does("tp_size", "int > 0", 1, "mesh.tp"),
            idle("tp_grain_size", "int > 0", 1, "cuts fall on elements, heads and groups as the table says"),
            refused("mpu", "any", None, "mesh"),
            refused("tp_group", "any", None, "mesh"),
        ),
        old("tensor_parallel", "block", "tp"),
        refused("injection_policy_tuple", "any", None, "tensor.table"),
        block(
            refused("partition_config", "block?", None, "tensor.table in a configuration of ours"),
            refused("use_default_specs", "bool", True, WITH_BLOCK),
            refused("strict_mode", "bool", False, WITH_BLOCK),
            refused("tp_size", "int > 0", 1, WITH_BLOCK),
            refused("embedding_partition_dim", "int", 1, WITH_BLOCK),
            refused("lm_head_patterns", "texts", ["lm_head", "embed_out"], WITH_BLOCK),
            block(
                refused("layer_specs", "list", [], WITH_BLOCK),
                refused("[].patterns", "texts", REQUIRED, WITH_BLOCK),
                refused("[].partition_type", "one of row|column|skip", "column", WITH_BLOCK),
                refused("[].gather_output", "bool", False, WITH_BLOCK),
                refused("[].grad_allreduce", "bool", False, WITH_BLOCK),
                refused("[].shape", "list?", None, WITH_BLOCK),
                refused("[].partition_dim", "int?", None, WITH_BLOCK),
                refused("[].model_types", "texts?", None, WITH_BLOCK),
            ),
        ),
        idle("preset_model", "text?", None, "the model's own plan or table says how it is cut"),
        idle("keep_module_on_host", "bool", False, "every rank reads only the slices that it holds"),
        refused("replace_with_kernel_inject", "bool", False, "leave it out"),
        old("kernel_inject", "bool", "replace_with_kernel_inject"),
    ),
    refused("sequence_parallel_size", "int > 0", 1, "leave it out: sequences are not cut over ranks yet"),
    does("data_parallel_size", "int > 0?", None, "mesh.dp"),
    idle(
        "use_data_before_expert_parallelism", "bool", False, "which ranks share an expert changes no number"
    ),
    *block(
        does("expert_parallel", "block", {}, "mesh.ep, mesh.etp"),
        does("enabled", "bool", False, "mesh.ep"),
        does("autoep_size", "int > 0", 1, "mesh.ep"),
        does("expert_tensor_parallel_size", "int > 0", 1, "mesh.etp"),
        idle("preset_model", "text?", None, EXPERTS_FOUND),
        idle("moe_layer_pattern", "text?", None, EXPERTS_FOUND),
        idle("expert_pattern", "text?", None, EXPERTS_FOUND),
        idle("router_pattern", "text?", None, EXPERTS_FOUND),
        idle("expert_w1", "text?", None, EXPERTS_FOUND),
        idle("expert_w2", "text?", None, EXPERTS_FOUND),
        idle("expert_w3", "text?", None, EXPERTS_FOUND),
        idle("num_experts_attr", "text?", None, EXPERTS_FOUND),
        idle("top_k_attr", "text?", None, EXPERTS_FOUND),
        idle("has_shared_experts", "bool?", None, EXPERTS_FOUND),
        idle("shared_experts_pattern", "text?", None, EXPERTS_FOUND),
        idle("shared_experts_gate_pattern", "text?", None, EXPERTS_FOUND),
        idle("validate_folding_routing", "bool", False, "counts are checked where rows are sent"),
        idle("async_split_plan", "bool", False, EXPERTS_RUN),
        idle("use_grouped_mm", "bool", True, EXPERTS_RUN),
        idle("disable_triton_grouped_mm", "bool", False, EXPERTS_RUN),
        idle("combine_impl", "text", "auto", EXPERTS_RUN),
        idle("row_weighting_impl", "one of auto|eager|fused", "auto", EXPERTS_RUN),
        idle("gate_up_impl", "one of separate|fused", "separate", EXPERTS_RUN),
        idle("comm_backend", "one of comm|deepep", "comm", EXPERTS_RUN),
        idle("comm_num_sm", "int > 0", 12, EXPERTS_RUN),
        idle("comm_qp_margin", "int >= 0", 4, EXPERTS_RUN),
        idle("comm_max_tokens_per_rank", "int >= 0", 0, EXPERTS_RUN),
        refused("route_norm", "bool?", None, EXPERTS_ROUTED),
        refused("route_scale", "num", 1.0, EXPERTS_ROUTED),
        refused("score_apply", "one of auto|pre|post", "auto", EXPERTS_ROUTED),
        refused("score_func", "one of auto|softmax|sigmoid", "auto", EXPERTS_ROUTED),
        refused("num_expert_groups", "int > 0?", None, EXPERTS_ROUTED),
        refused("num_limited_groups", "int > 0?", None, EXPERTS_ROUTED),
        refused("top_k", "any", "auto", EXPERTS_ROUTED),
        refused("routed_scaling_factor", "any", "auto", EXPERTS_ROUTED),
        refused("expert_activation", "text?", None, EXPERTS_ROUTED),
        refused(
            "load_balance_coeff",
            "any",
            None,
            "leave it out, as there: give the model a balance loss of its own",
        ),
    ),
    *block(
        does("compile", "block", {}, "compile"),
        does("deepcompile", "bool", False, "compile: blocks"),
        idle("disable", "bool", False, _OLD_COMPILE),
        idle("enabled", "bool", False, _OLD_COMPILE),
        idle("backend", "text?", None, _OLD_COMPILE),
        idle("kwargs", "any", None, _OLD_COMPILE),
        idle("autoep_non_moe", "bool", False, COMPILER),
        idle("free_activation", "bool", False, COMPILER),
        idle("free_activation_threshold", "int >= 0", 10 << 20, COMPILER),
        does("offload_activation", "bool", False, "offload.activations: host where deepcompile is true"),
        idle("offload_activation_pin_memory", "bool", True, COMPILER),
        refused("offload_opt_states", "bool", False, "zero_optimization.offload_optimizer"),
        idle("double_buffer", "bool", True, COMPILER),
        idle("symmetric_memory", "bool", False, COMPILER),
        idle("debug_log", "bool", False, "TORCH_LOGS shows the graphs"),
        refused("offload_parameters", "bool", False, "zero_optimization.offload_param"),
        idle("sync_before_reduce", "bool", False, COMPILER),
        idle("sync_after_reduce", "bool", False, COMPILER),
        idle("sync_before_allgather", "bool", False, COMPILER),
        idle("sync_after_allgather", "bool", False, COMPILER),
        idle("keep_int_input_tensors", "bool", True, COMPILER),
        idle("keep_all_input_tensors", "bool", False, COMPILER),
        idle("passes", "list?", None, COMPILER),
    ),
    *block(
        idle("aio", "block?", None, _AIO),
        idle("block_size", "int > 0", 1 << 20, _AIO),
        idle("queue_depth", "int > 0", 8, _AIO),
        idle("intra_op_parallelism", "int > 0", 1, _AIO),
        idle("thread_count", "int > 0", 1, _AIO),
        idle("single_submit", "bool", False, _AIO),
        idle("overlap_events", "bool", True, _AIO),
        idle("use_gds", "bool", False, _AIO),
    ),
]

_CHECKPOINT = [
    *block(
        does("checkpoint", "block", {}, "checkpoint"),
        idle("tag_validation", "one of warn|ignore|fail", "WARN", "rank 0 names the step for all ranks"),
        idle("load_universal", "bool", False, "every checkpoint loads on any layout"),
        idle("use_node_local_storage", "bool", False, "every rank writes into the folder that it is given"),
        block(
            idle("parallel_write", "block", {}, SAVES),
            idle("pipeline_stage", "bool", False, SAVES),
        ),
        idle("checkpoint_serialization", "bool", True, "tensors lie in safetensors, everything else in JSON"),
        block(
            does("writer", "block?", None, "checkpoint"),
            idle("type", "one of fast|python|mock", "FAST", SAVES),
            idle("io_buffer_size", "int > 0", 64 << 20, SAVES),
            idle("io_buffer_double", "bool", True, SAVES),
            idle("show_statistics", "bool", False, SAVES),
            idle("data_parallel", "one of replica|socket|machine?", None, SAVES),
            does("decoupled", "bool", False, "checkpoint.asynchronous"),
            idle("io_multiplier", "int > 0", 1, SAVES),
        ),
    ),
    *block(
        refused("nebula", "block", {}, "checkpoint.writer: {decoupled: true}, which saves behind training"),
        refused("enabled", "bool", False, WITH_BLOCK),
        refused("enable_nebula_load", "bool", True, WITH_BLOCK),
        refused("nebula_load_path", "text?", None, WITH_BLOCK),
        refused("load_path", "text?", None, WITH_BLOCK),
        refused("persistent_storage_path", "text?", None, WITH_BLOCK),
        refused("persistent_time_interval", "num > 0", 100, WITH_BLOCK),
        refused("num_of_version_in_retention", "int > 0", 2, WITH_BLOCK),
    ),
    refused(
        "datastates_ckpt", "any", None, "checkpoint.writer: {decoupled: true}, which saves behind training"
    ),
]

_TAGS = "with their tags (Train/Samples/train_loss, lr, loss_scale), counted in samples"
_SPEED = "metrics.csv and the printed lines have seconds and samples of every step"
_COMMS = "engine.trace says what was sent, with seconds and bytes, without it"
_OBSERVE = [
    does("steps_per_print", "count?", None, "monitor.print_every"),
    does("wall_clock_breakdown", "bool", False, "monitor.breakdown; of the lines of steps_per_print"),
    idle("memory_breakdown", "bool", False, "engine.plan says the bytes of a rank"),
    does(
        "dump_state", "bool", False, "shardwise.deepspeed.initialize logs the Plan and the value of every key"
    ),
    idle("log_level", "text?", None, 'logging.getLogger("shardwise").setLevel(...) sets it'),
    *block(
        does("tensorboard", "block", {}, f"monitor.tensorboard; {_TAGS}"),
        does("enabled", "bool", False, "monitor.tensorboard"),
        does("output_path", "text", "", "monitor.tensorboard; the folder, with job_name in it"),
        does("job_name", "text", "DeepSpeedJobName", "monitor.tensorboard; the folder in output_path"),
    ),
    *block(
        does("wandb", "block", {}, f"monitor.wandb; {_TAGS}"),
        does("enabled", "bool", False, "monitor.wandb"),
        does("group", "text?", None, "monitor.wandb_group"),
        does("team", "text?", None, "monitor.wandb_team"),
        does("project", "text", "deepspeed", "monitor.wandb"),
    ),
    *block(
        does("csv_monitor", "block", {}, f"monitor.csv_per_tag; {_TAGS}"),
        does("enabled", "bool", False, "monitor.csv_per_tag"),
        does("output_path", "text", "", "monitor.csv_per_tag; the folder, with job_name in it"),
        does("job_name", "text", "DeepSpeedJobName", "monitor.csv_per_tag; the folder in output_path"),
    ),
    *block(
        does("comet", "block", {}, f"monitor.comet; {_TAGS}"),
        does("enabled", "bool", False, "monitor.comet; needs a project"),
        idle("samples_log_interval", "int > 0", 100, "every step is sent"),
        does("project", "text?", None, "monitor.comet"),
        does("workspace", "text?", None, "monitor.comet_workspace"),
        refused("api_key", "text?", None, "COMET_API_KEY in the environment, or comet's own file"),
        does("experiment_name", "text?", None, "monitor.comet_experiment"),
        refused("experiment_key", "text?", None, "experiment_name"),
        refused("online", "bool?", None, "COMET_MODE in the environment"),
        refused("mode", "text?", None, "COMET_START_MODE in the environment"),
    ),
    *block(
        idle("comms_logger", "block", {}, _COMMS),
        idle("enabled", "bool", False, _COMMS),
        idle("verbose", "bool", False, _COMMS),
        idle("prof_all", "bool", True, _COMMS),
        idle("debug", "bool", False, _COMMS),
        idle("prof_ops", "texts", [], _COMMS),
    ),
    *block(
        does("flops_profiler", "block", {}, "module_profile"),
        does("enabled", "bool", False, "module_profile"),
        idle("recompute_fwd_factor", "num >= 0", 0.0, "operations that run again are known, and not counted"),
        does("profile_step", "int > 0", 1, "module_profile.step"),
        does("module_depth", "int", -1, "module_profile.depth; all levels where it is negative"),
        does("top_modules", "int > 0", 1, "module_profile.top"),
        does("detailed", "bool", True, "module_profile.tree"),
        does("output_file", "text?", None, "module_profile.output"),
    ),
    *block(
        idle("timers", "block", {}, _SPEED),
        block(
            idle("throughput", "block", {}, _SPEED),
            idle("enabled", "bool", True, _SPEED),
            idle("synchronized", "bool", True, _SPEED),
        ),
    ),
]

_DIFFICULTY = (
    refused("difficulty_type", "one of value|percentile", "value", WITH_BLOCK),
    refused("clustering_type", "text", "schedule_based", WITH_BLOCK),
    refused("index_to_sample_path", "text?", None, WITH_BLOCK),
    refused("index_to_metric_path", "text?", None, WITH_BLOCK),
)


def _curriculum() -> list[DeepSpeedKey]:
    return [
        refused("min_difficulty", "num", 1, WITH_BLOCK),
        refused("max_difficulty", "num", 1, WITH_BLOCK),
        refused(
            "schedule_type", "one of fixed_linear|fixed_root|fixed_discrete|custom", "custom", WITH_BLOCK
        ),
        *block(
            refused("schedule_config", "block", {}, WITH_BLOCK),
            refused("total_curriculum_step", "int > 0", 1, WITH_BLOCK),
            refused("difficulty_step", "num > 0", 1, WITH_BLOCK),
            refused("root_degree", "num > 0", 2, WITH_BLOCK),
            refused("difficulty", "numbers", [], WITH_BLOCK),
            refused("max_step", "numbers", [], WITH_BLOCK),
        ),
    ]


_ORDER = "the data in the order that the run needs; leave the block out"
_DATA = [
    does("dataloader_drop_last", "bool", False, "the loader that shardwise.deepspeed.initialize makes"),
    *block(
        refused("data_efficiency", "block", {}, _ORDER),
        refused("enabled", "bool", False, WITH_BLOCK),
        refused("seed", "int", 1234, WITH_BLOCK),
        block(
            refused("data_sampling", "block", {}, WITH_BLOCK),
            refused("enabled", "bool", False, WITH_BLOCK),
            refused("num_epochs", "int > 0", 1000, WITH_BLOCK),
            refused("num_workers", "int >= 0", 0, WITH_BLOCK),
            refused("pin_memory", "bool", False, WITH_BLOCK),
            block(
                refused("curriculum_learning", "block", {}, WITH_BLOCK),
                refused("enabled", "bool", False, WITH_BLOCK),
                refused("data_cluster_path", "text?", None, WITH_BLOCK),
                block(
                    refused("curriculum_metrics", "block", {}, WITH_BLOCK),
                    block(refused("NAME", "block", {}, WITH_BLOCK), *_DIFFICULTY, _curriculum()),
                ),
            ),
            block(
                refused("dynamic_batching", "block", {}, WITH_BLOCK),
                refused("enabled", "bool", False, WITH_BLOCK),
                refused("metrics_path", "text?", None, WITH_BLOCK),
                refused("lr_scaling_method", "one of linear|sqrt|none", "linear", WITH_BLOCK),
                refused("min_batch_size", "int > 0", 1, WITH_BLOCK),
                refused("max_batch_size", "int > 0?", None, WITH_BLOCK),
                refused(
                    "sequence_picking_order", "one of dataloader|random|seqlen", "dataloader", WITH_BLOCK
                ),
                refused("max_tokens", "int > 0?", None, WITH_BLOCK),
                refused("verbose", "bool", False, WITH_BLOCK),
            ),
        ),
        block(
            refused("data_routing", "block", {}, WITH_BLOCK),
            refused("enabled", "bool", False, WITH_BLOCK),
            block(
                refused("random_ltd", "block", {}, WITH_BLOCK),
                refused("enabled", "bool", False, WITH_BLOCK),
                refused("total_layer_num", "int > 0?", None, WITH_BLOCK),
                refused("random_ltd_layer_num", "int > 0?", None, WITH_BLOCK),
                refused("random_ltd_layer_id", "numbers", [], WITH_BLOCK),
                refused("model_mask_name", "text?", None, WITH_BLOCK),
                refused("model_type", "text?", None, WITH_BLOCK),
                refused("micro_batch_size", "int > 0?", None, WITH_BLOCK),
                refused("global_batch_size", "int > 0?", None, WITH_BLOCK),
                refused("hidden_state_order", "text?", None, WITH_BLOCK),
                block(
                    refused("random_ltd_schedule", "block", {}, WITH_BLOCK),
                    refused("min_value", "int", 0, WITH_BLOCK),
                    refused("max_value", "int", 0, WITH_BLOCK),
                    refused("schedule_type", "text", "fixed_linear", WITH_BLOCK),
                    block(
                        refused("schedule_config", "block", {}, WITH_BLOCK),
                        refused("require_steps", "int > 0", 1, WITH_BLOCK),
                        refused("seq_per_step", "int > 0", 1, WITH_BLOCK),
                    ),
                ),
                block(
                    refused("layer_token_lr_schedule", "block", {}, WITH_BLOCK),
                    refused("enabled", "bool", False, WITH_BLOCK),
                    refused("total_layer_tokens", "int > 0?", None, WITH_BLOCK),
                    refused("warmup_type", "text?", None, WITH_BLOCK),
                    refused("warmup_layer_tokens", "int > 0?", None, WITH_BLOCK),
                ),
            ),
        ),
    ),
    *block(
        refused("curriculum_learning", "block", {}, _ORDER),
        refused("enabled", "bool", False, WITH_BLOCK),
        refused("curriculum_type", "text", "seqlen", WITH_BLOCK),
        _curriculum(),
    ),
]

_UNREAD = "DeepSpeed reads no such key"
_PRUNING = ["sparse_pruning", "row_pruning", "head_pruning", "channel_pruning"]
_ASIDE = [
    *block(
        refused("autotuning", "block", {}, NOT_TUNED),
        refused("enabled", "bool", False, WITH_BLOCK),
        refused("fast", "bool", True, WITH_BLOCK),
        refused("results_dir", "text", "autotuning_results", WITH_BLOCK),
        refused("exps_dir", "text", "autotuning_exps", WITH_BLOCK),
        refused("overwrite", "bool", True, WITH_BLOCK),
        refused("start_profile_step", "int >= 0", 3, WITH_BLOCK),
        refused("end_profile_step", "int >= 0", 5, WITH_BLOCK),
        refused("metric", "one of throughput|latency|flops", "throughput", WITH_BLOCK),
        refused("metric_path", "text?", None, WITH_BLOCK),
        refused("tuner_type", "one of gridsearch|random|model_based", "gridsearch", WITH_BLOCK),
        refused("tuner_early_stopping", "int >= 0", 5, WITH_BLOCK),
        refused("tuner_num_trials", "int > 0", 50, WITH_BLOCK),
        refused("arg_mappings", "any", None, WITH_BLOCK),
        refused("max_train_batch_size", "int > 0?", None, WITH_BLOCK),
        refused("min_train_batch_size", "int > 0", 1, WITH_BLOCK),
        refused("max_train_micro_batch_size_per_gpu", "int > 0", 1024, WITH_BLOCK),
        refused("min_train_micro_batch_size_per_gpu", "int > 0", 1, WITH_BLOCK),
        refused("num_tuning_micro_batch_sizes", "int > 0", 3, WITH_BLOCK),
        refused("mp_size", "int > 0", 1, WITH_BLOCK),
        block(
            refused("model_info", "block?", None, WITH_BLOCK),
            refused("profile", "bool", False, WITH_BLOCK),
            refused("num_params", "int?", None, WITH_BLOCK),
            refused("hidden_size", "int?", None, WITH_BLOCK),
            refused("num_layers", "int?", None, WITH_BLOCK),
        ),
        refused("model_info_path", "text?", None, WITH_BLOCK),
    ),
    *block(
        refused(
            "elasticity", "block", {}, "a checkpoint loads on any number of ranks; give train_batch_size"
        ),
        refused("enabled", "bool", False, WITH_BLOCK),
        refused("max_train_batch_size", "int > 0", 2000, WITH_BLOCK),
        refused("micro_batch_sizes", "numbers", [2, 4, 6], WITH_BLOCK),
        refused("min_gpus", "int > 0", 1, WITH_BLOCK),
        refused("max_gpus", "int > 0", 10000, WITH_BLOCK),
        refused("num_gpus_per_node", "int > 0", 1, WITH_BLOCK),
        refused("model_parallel_size", "int > 0", 1, WITH_BLOCK),
        refused("min_time", "num >= 0", 0, WITH_BLOCK),
        refused("prefer_larger_batch", "bool", True, WITH_BLOCK),
        refused("ignore_non_elastic_batch_info", "bool", False, WITH_BLOCK),
        refused("version", "any", 0.2, WITH_BLOCK),
    ),
    *block(
        refused("hybrid_engine", "block", {}, "engine.full_parameters() gathers once for generation"),
        refused("enabled", "bool", False, WITH_BLOCK),
        refused("max_out_tokens", "int > 0", 512, WITH_BLOCK),
        refused("inference_tp_size", "int > 0", 1, WITH_BLOCK),
        refused("release_inference_cache", "bool", False, WITH_BLOCK),
        refused("pin_parameters", "bool", True, WITH_BLOCK),
        refused("tp_gather_partition_size", "int > 0", 8, WITH_BLOCK),
        refused("enable_cuda_graph", "bool", False, WITH_BLOCK),
    ),
    *block(
        refused("progressive_layer_drop", "block", {}, "leave it out; a model may drop layers by itself"),
        refused("enabled", "bool", False, WITH_BLOCK),
        refused("theta", "num", 1.0, WITH_BLOCK),
        refused("gamma", "num", 0.001, WITH_BLOCK),
    ),
    *block(
        refused("eigenvalue", "block", {}, "leave it out"),
        refused("enabled", "bool", False, WITH_BLOCK),
        refused("verbose", "bool", False, WITH_BLOCK),
        refused("max_iter", "int > 0", 100, WITH_BLOCK),
        refused("tol", "num > 0", 1e-2, WITH_BLOCK),
        refused("stability", "num >= 0", 1e-6, WITH_BLOCK),
        refused("gas_boundary_resolution", "int > 0", 1, WITH_BLOCK),
        refused("layer_name", "text", "bert.encoder.layer", WITH_BLOCK),
        refused("layer_num", "int >= 0", 0, WITH_BLOCK),
    ),
    refused("quantize_training", "any", None, "train in bf16; leave the block out"),
    *block(
        refused(
            "weight_quantization",
            "block?",
            None,
            "weights are kept in precision.compute; leave the block out",
        ),
        refused("enabled", "bool", True, WITH_BLOCK),
        refused("num_bits", "int > 0", 8, WITH_BLOCK),
        refused("q_type", "text", "symmetric", WITH_BLOCK),
        refused("q_groups", "int > 0", 1, WITH_BLOCK),
        refused("quantized_initialization", "any", {}, WITH_BLOCK),
        refused("post_init_quant", "any", {}, WITH_BLOCK),
    ),
    *block(
        refused("compression_training", "block", {}, "compress the trained model; leave the block out"),
        *(
            refused(name, "any", None, WITH_BLOCK)
            for name in ("weight_quantization", "activation_quantization")
        ),
        *(refused(name, "any", None, WITH_BLOCK) for name in _PRUNING),
        refused("layer_reduction", "any", None, WITH_BLOCK),
    ),
    *block(
        refused(
            "sparse_attention",
            "block?",
            None,
            "an attention function of the model's own; leave the block out",
        ),
        refused("mode", "text", "fixed", WITH_BLOCK),
        refused("block", "int > 0", 16, WITH_BLOCK),
        refused("different_layout_per_head", "bool", False, WITH_BLOCK),
        refused("num_local_blocks", "int > 0", 4, WITH_BLOCK),
        refused("num_global_blocks", "int > 0", 1, WITH_BLOCK),
        refused("attention", "one of unidirectional|bidirectional", "bidirectional", WITH_BLOCK),
        refused("horizontal_global_attention", "bool", False, WITH_BLOCK),
        refused("num_different_global_patterns", "int > 0", 1, WITH_BLOCK),
        refused("num_random_blocks", "int >= 0", 0, WITH_BLOCK),
        refused("local_window_blocks", "numbers", [4], WITH_BLOCK),
        refused("global_block_indices", "numbers", [0], WITH_BLOCK),
        refused("global_block_end_indices", "numbers?", None, WITH_BLOCK),
        refused("num_sliding_window_blocks", "int > 0", 3, WITH_BLOCK),
    ),
    idle("graph_harvesting", "bool", False, "a step's list is planned once and walked every step"),
    idle(
        "vocabulary_size",
        "int > 0?",
        None,
        "DeepSpeed warns by it where it does not divide by 8, and does no more",
    ),
    idle("local_rank", "int?", None, "a rank knows its place from its launcher"),
    idle(
        "cuda_visible_devices",
        "any",
        None,
        f"{_UNREAD}; CUDA_VISIBLE_DEVICES in the environment chooses devices",
    ),
    idle("comms_config", "any", None, f"{_UNREAD}; the key is comms_logger"),
    idle("monitor_config", "any", None, f"{_UNREAD}; the keys are tensorboard, wandb, csv_monitor and comet"),
    refused("msamp", "any", None, "bf16; leave the block out"),
    refused("fp8", "any", None, f"bf16; {_UNREAD}, and nothing would train in 8 bits"),
    refused("sequence_parallel", "any", None, f"leave it out: {_UNREAD}, and no sequence would be cut"),
]

_TOP = [
    does("train_batch_size", "int > 0?", None, "batch.global_size"),
    does("train_micro_batch_size_per_gpu", "int > 0?", None, "batch.micro_size"),
    does("gradient_accumulation_steps", "int > 0?", None, "batch.accumulation"),
    refused(
        "managed_gradient_accumulation",
        "bool",
        True,
        "leave it out: the engine counts the microbatches of a step",
    ),
    does("gradient_clipping", "num >= 0", 1.0, "max_grad_norm; 0 is none, left out it is 1"),
    idle("prescale_gradients", "bool", False, "the sum is scaled once, by what all microbatches weigh"),
    idle(
        "gradient_predivide_factor", "num > 0", 1.0, "the sum is scaled once, by what all microbatches weigh"
    ),
    refused(
        "gradient_allreduce_op", "one of mean|sum", "mean", "a loss that is multiplied by the number of ranks"
    ),
    idle("sparse_gradients", "bool", False, "gradients are summed dense, which gives the same numbers"),
    idle("disable_allgather", "bool", False, PLAIN),
    idle("disable_python_gc", "bool", False, "gc.disable() does it"),
    idle("allgather_size", "int > 0", 500_000_000, BUCKETS),
    idle("fp32_allreduce", "bool", False, "communication_data_type says it"),
    idle("zero_allow_untested_optimizer", "bool", False, "every optimizer that is taken is exact on shards"),
    idle("zero_force_ds_cpu_optimizer", "bool", True, "the optimizer steps where its state lies"),
]

KEYS: tuple[DeepSpeedKey, ...] = (
    *_TOP,
    *_OPTIMIZER,
    *_SCHEDULER,
    *_PRECISION,
    *_ZERO,
    *_MEMORY,
    *_PARALLEL,
    *_CHECKPOINT,
    *_DATA,
    *_OBSERVE,
    *_ASIDE,
)
