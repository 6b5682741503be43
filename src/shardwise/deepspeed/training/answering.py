"""``init_inference``: a model for inference, cut over ``tensor_parallel.tp_size`` ranks, without an optimizer.

    engine = deepspeed.init_inference(model, tensor_parallel={"tp_size": 2}, dtype=torch.bfloat16, checkpoint="runs/x")
    logits = engine(input_ids=tokens).logits
    tokens = engine.generate(tokens, max_new_tokens=20)

The forward pass is the training engine's, so logits equal those of training with the same dtype. Ranks beyond
``tp_size`` are replicas, each with its own inputs. The model's own kernels are used.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.base.errors import ConfigError, UsageError
from shardwise.base.policy import nearest
from shardwise.checkpoint.steps import steps_at
from shardwise.deepspeed.calls.collectives import init_distributed
from shardwise.deepspeed.files import saved
from shardwise.deepspeed.training.experts import expert_ranks
from shardwise.engine.construction.build import initialize as build_engine
from shardwise.engine.engine import Engine
from shardwise.models.torch_file import check_torch_file
from shardwise.precision.policy import NAMES

_DTYPES: dict[Any, torch.dtype] = {
    **{
        name: dtype
        for names, dtype in (
            (("fp32", "float32", "float", "torch.float32", "torch.float"), torch.float32),
            (("fp16", "float16", "half", "torch.float16", "torch.half"), torch.float16),
            (("bf16", "bfloat16", "torch.bfloat16"), torch.bfloat16),
        )
        for name in names
    },
    **{dtype: dtype for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64)},
}
_NO_EFFECT = {
    "replace_with_kernel_inject": "the model's own kernels are used",
    "kernel_inject": "the model's own kernels are used",
    "replace_method": "the model's own kernels are used",
    "injection_policy": "what is cut follows from the model, or from tensor.table",
    "injection_policy_tuple": "what is cut follows from the model, or from tensor.table",
    "max_out_tokens": "caches grow with what is generated",
    "max_tokens": "caches grow with what is generated",
    "min_out_tokens": "caches grow with what is generated",
    "max_batch_size": "caches grow with what is generated",
    "return_tuple": "outputs are the model's own",
    "triangular_masking": "masks are the model's own",
    "training_mp_size": "a checkpoint loads on any ranks",
    "save_mp_checkpoint_path": "",
    "keep_module_on_host": "parameters lie where the rank computes",
    "set_empty_params": "make the model on meta, or under zero.Init",
    "enable_cuda_graph": "",
    "use_triton": "",
    "triton_autotune": "",
    "zero": "",
    "quant": "",
}
"""DeepSpeed's keys without an effect, each with the reason. A key without a reason is refused if it is switched on."""
_KNOWN = {"moe", "dtype", "tensor_parallel", "tp", "mp_size", "checkpoint", "base_dir", *_NO_EFFECT}


class InferenceEngine(nn.Module):
    """A model for inference; see the module's docstring. Created by ``init_inference``."""

    optimizer = lr_scheduler = None

    def __init__(self, ours: Engine) -> None:
        super().__init__()
        self.module = ours.module
        """The model."""
        self.ours = ours
        """The Shardwise engine."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model without gradients and return its output, on every rank that shares the model."""
        return self.ours.predict([None], lambda model, _: model(*inputs, **kwargs))[0]

    @torch.no_grad()
    def generate(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the model's own ``generate`` and return its result.

        Raises:
            UsageError: if the model has no such method.
        """
        if not hasattr(self.module, "generate"):
            raise UsageError(
                f"generate: {type(self.module).__name__} has no such method; call the engine itself"
            )
        return self.ours.run("generate", *inputs, **kwargs)

    def destroy(self) -> None:
        """Close the engine and restore the model to its original form. Collective."""
        self.ours.close()


def init_inference(
    model: nn.Module, config: Mapping[str, Any] | None = None, **options: Any
) -> InferenceEngine:
    """Prepare ``model`` for inference and return it behind ``forward`` and ``generate``. Collective.

    ``config`` and ``options`` together are one set of keys:

    dtype             dtype of weights and activations (default fp16, as in DeepSpeed)
    tensor_parallel   {"tp_size": N}; also ``mp_size``
    moe               {"ep_size": N}: the number of ranks over which experts are distributed, if no layer gives it;
                      the other keys of the block describe the model
    checkpoint        a folder that save_checkpoint wrote (Shardwise's or DeepSpeed's), a Shardwise run or step, or a
                      file of torch
    base_dir          the folder that ``checkpoint`` is relative to

    Args:
        model: The module; its parameters stop requiring gradients.
        config: Keys of the configuration.
        **options: More keys, none of which is in ``config``.

    Raises:
        ConfigError: if a key is unknown, unsupported or invalid; the error names it.
        CheckpointError: if the checkpoint cannot be read.
        MismatchError: if the checkpoint belongs to another model.
    """
    keys = dict(config or {})
    twice = keys.keys() & options.keys()
    if twice:
        raise ConfigError(f"init_inference: {min(twice)} is given in config and beside it; keep one")
    keys |= options
    for key, value in keys.items():
        if key not in _KNOWN:
            raise ConfigError(f"init_inference: unknown key {key!r}{nearest(key, _KNOWN)}")
        is_on = value not in (None, False, {}) and not (
            isinstance(value, Mapping) and not value.get("enabled")
        )
        if is_on and _NO_EFFECT.get(key) == "":
            raise ConfigError(f"init_inference: {key} is not supported; leave it out")
    dtype = _dtype_of(keys.get("dtype", torch.float16))
    init_distributed()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    mesh = {"tp": _ranks_of(keys), "ep": expert_ranks(model, _expert_ranks_of(keys), "init_inference")}
    settings = {"mesh": mesh, "precision": NAMES[dtype], "check_first_step": "off"}
    made = InferenceEngine(build_engine(model.eval(), settings))
    made.ours.eval()
    if keys.get("checkpoint") is not None:
        _load(made, keys["checkpoint"], keys.get("base_dir") or "")
    return made


def _dtype_of(given: Any) -> torch.dtype:
    found = _DTYPES.get(given.lower() if isinstance(given, str) else given)
    if found is None:
        raise ConfigError(f"init_inference: dtype {given!r}; expected fp32, fp16 or bf16, or torch's own")
    return found


def _ranks_of(keys: Mapping[str, Any]) -> int:
    block = keys.get("tensor_parallel", keys.get("tp")) or {}
    if not isinstance(block, Mapping) or set(block) - {
        "tp_size",
        "enabled",
        "tp_grain_size",
        "mpu",
        "tp_group",
    }:
        raise ConfigError(f'init_inference: tensor_parallel {block!r}; expected {{"tp_size": N}}')
    sizes = {int(size) for size in (block.get("tp_size"), keys.get("mp_size")) if size is not None}
    if len(sizes) > 1:
        raise ConfigError(
            f"init_inference: tp_size and mp_size are one thing, given {sorted(sizes)}; keep one"
        )
    return sizes.pop() if sizes else 1


def _expert_ranks_of(keys: Mapping[str, Any]) -> int:
    block = keys.get("moe") or {}
    if isinstance(block, bool):
        return 1
    known = {
        "enabled",
        "ep_size",
        "moe_experts",
        "num_experts",
        "type",
        "ep_mp_group",
        "ep_group",
        "expert_group",
    }
    if not isinstance(block, Mapping) or set(block) - known:
        raise ConfigError(f'init_inference: moe {block!r}; expected {{"ep_size": N}}')
    return int(block.get("ep_size", 1))


def _load(engine: InferenceEngine, given: Any, base: str) -> None:
    if not isinstance(given, str | Path):
        raise ConfigError(
            f"init_inference: checkpoint is a {type(given).__name__}; expected a folder or a file of torch's"
        )
    path = Path(base) / given
    if path.is_file():
        check_torch_file(path)
        # weights_only: without it, a pickle could run code.
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        engine.ours.load_state_dict(state.get("module", state))
    elif steps_at(path) is not None:
        engine.ours.load(path, weights_only=True)
    else:
        is_tag = not (path / saved.LATEST).is_file()
        where, tag = (path.parent, path.name) if is_tag else (path, None)
        saved.load(
            engine, where, tag, strict=True, wants_optimizer=False, wants_scheduler=False, module_only=True
        )
