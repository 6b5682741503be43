"""Methods of DeepSpeed's engine that this engine does not have, each with a replacement.

``hasattr(engine, name)`` is False for such a method, and ``engine.name`` raises an AttributeError with the sentence.
"""

_SPARSE = "gradients of embeddings are summed as any others, to the same numbers; drop the call"
_REDUCED = (
    "gradients are summed by the backward pass that ends a step; for tensors of your own call "
    "deepspeed.comm.all_reduce"
)
_COMPILED = 'torch.compile compiles the blocks, where "compile": {"deepcompile": true} asks for it'
_CURRICULUM = "the order of the data is the sampler's own; give deepspeed_io a data_sampler"

INSTEAD = {
    "all_gather_scalar": "call deepspeed.comm.all_gather",
    "allreduce_and_copy": _REDUCED,
    "allreduce_bucket": _REDUCED,
    "allreduce_no_retain": _REDUCED,
    "buffered_allreduce_fallback": _REDUCED,
    "sparse_all_gather": _SPARSE,
    "sparse_allreduce": _SPARSE,
    "sparse_allreduce_bucket": _SPARSE,
    "sparse_allreduce_no_retain": _SPARSE,
    "get_autosp_backend": _COMPILED,
    "get_autotp_backend": _COMPILED,
    "get_deepcompile_backend": _COMPILED,
    "get_deepspeed_compile_backend": _COMPILED,
    "register_compile_pass": _COMPILED,
    "get_compile_time": _COMPILED,
    "get_optimizer_configuration": "engine.optimizer.param_groups has the optimizer's numbers",
    "load_moe_state_dict": "call load_checkpoint, which loads all that a checkpoint has",
    "print_forward_breakdown": "engine.get_wall_clock_timers() has times of a step, module_profile those of modules",
    "random_ltd_initialize": "no tokens are left out of layers here; drop the call",
    "set_custom_curriculum_learning_schedule": _CURRICULUM,
    "set_data_post_process_func": "change samples in the dataset, or in collate_fn of initialize",
    "log_for_device": "print_dist of deepspeed.utils.logging prints on chosen ranks",
    "tput_log": "steps_per_print prints how long steps take",
}
"""The replacement of each method, in one sentence."""
