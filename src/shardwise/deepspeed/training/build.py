"""``initialize``: turn DeepSpeed's thirteen arguments into a Shardwise engine behind DeepSpeed's methods.

configuration    config/deepspeed.py translates it; batch, stage, dtypes and clipping are applied by the engine
optimizer        a torch optimizer: the user's object, the result of the user's callable, or the optimizer that the
                 configuration names under ``optimizer:``. The engine rebuilds the optimizer on its shards and reads
                 ``param_groups`` before every step
lr_scheduler     an object, the result of a callable that takes the optimizer, or the scheduler that the
                 configuration names under ``scheduler:``; stepped after each applied step
training_data    read in DeepSpeed's order (loader.py)
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn, optim

from shardwise.base.errors import UsageError
from shardwise.config.run import RunConfig
from shardwise.deepspeed.calls.collectives import init_distributed
from shardwise.deepspeed.calls.unmet import UnmetError
from shardwise.deepspeed.training.engine import DeepSpeedEngine
from shardwise.deepspeed.training.experts import expert_ranks, layers_of
from shardwise.deepspeed.training.leaf_modules import mark_configured
from shardwise.deepspeed.training.loader import DeepSpeedDataLoader
from shardwise.deepspeed.training.optimizer import DeepSpeedOptimizer
from shardwise.deepspeed.training.pipeline_engine import PipelineEngine
from shardwise.deepspeed.training.pipeline_module import PipelineModule
from shardwise.deepspeed.training.rate_schedulers import scheduler_of
from shardwise.deepspeed.training.settings import DeepSpeedConfig, DeepSpeedConfigError
from shardwise.engine.construction.build import initialize as build_engine
from shardwise.engine.engine import Engine
from shardwise.optim.named_rules import NamedRules

_log = logging.getLogger(__name__)

Optimizer = optim.Optimizer | Callable[[Any], optim.Optimizer] | None
"""A torch optimizer, or a callable that makes one from parameters."""
Scheduler = Any
"""An object with a ``step`` method, or a callable that makes such an object from an optimizer."""
Made = tuple[DeepSpeedEngine, DeepSpeedOptimizer | None, DeepSpeedDataLoader | None, Any]


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizer = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[Any], Any] | None = None,
    config: "Mapping[str, Any] | str | Path | None" = None,
    mesh_param: Any = None,
    config_params: "Mapping[str, Any] | str | Path | None" = None,
) -> Made:
    """Build the engine for ``model`` and return (engine, optimizer, loader, scheduler).

    Collective: all ranks call this function. The last three results are None if the call has no optimizer, no
    training data or no scheduler.

    Args:
        args: The script's parsed arguments. Its ``deepspeed_config`` is used if ``config`` is not given.
        model: The module to train. Required.
        optimizer: A torch optimizer, or a function of the parameters that returns one. None: the optimizer that the
            configuration names.
        model_parameters: The parameters to train: parameters, or groups of parameters as torch's optimizers take
            them. None: all parameters that require gradients.
        training_data: A dataset from which the engine makes its own loader.
        lr_scheduler: A scheduler, or a function of the optimizer that returns one. None: the scheduler that the
            configuration names.
        distributed_port: No effect: the environment gives the address and the port.
        mpu: A model-parallel unit, which is compared with the mesh; its ranks that share a sequence are ``mesh.cp``.
        dist_init_required: As in ``init_distributed``.
        collate_fn: The function that makes a batch from samples, for the engine's loaders.
        config: A dictionary, a path, or url-safe base64 of JSON.
        mesh_param: Sizes (data-parallel, sequence-parallel); the second is ``mesh.cp``.
        config_params: An older name of ``config``.

    Raises:
        ConfigError: if the configuration is missing, given twice, or invalid.
        UsageError: if arguments contradict the configuration or the mesh.
    """
    model = _checked_module(model)
    settings = DeepSpeedConfig(_one_config(args, config, config_params))
    _check_batch(settings)
    _check_mesh(mpu, settings)
    init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    pipeline = _pipeline_of(model, settings)
    basic = _optimizer_of(model, settings, optimizer, model_parameters)
    scheduler = _scheduler_of(settings, basic, lr_scheduler)
    said = pipeline, _experts_of(model, settings), _sequences_of(mpu, mesh_param, settings)
    ours = build_engine(model, _run_config(settings, *said), optimizer=basic)
    _take_results(settings, ours, model)
    kind = PipelineEngine if isinstance(model, PipelineModule) else DeepSpeedEngine
    _check_places(mpu, ours)
    engine = kind(ours, settings, basic, scheduler, collate_fn, mpu)
    if training_data is not None:
        engine.take_training_data(training_data)
    _log_settings(settings, ours)
    return engine, engine.optimizer, engine.training_dataloader, scheduler


def _checked_module(model: Any) -> nn.Module:
    """Return ``model`` as a module.

    Raises:
        UnmetError: if ``model`` is missing.
        UsageError: if ``model`` is no module.
    """
    if model is None:
        raise UnmetError("deepspeed.initialize: model is required")
    if not isinstance(model, nn.Module):
        raise UsageError(f"deepspeed.initialize: model is {model!r:.100}; give a module")
    return model


def _take_results(settings: DeepSpeedConfig, ours: Engine, model: nn.Module) -> None:
    """Set the sizes of the batch that the engine resolved, and mark the leaf modules if the engine cuts weights."""
    batch = ours.config.batch
    settings.change("train_batch_size", batch.global_size)
    settings.change("train_micro_batch_size_per_gpu", batch.micro_size)
    settings.change("gradient_accumulation_steps", batch.accumulation)
    if ours.config.zero.stage == 3:
        leaves = settings.value("zero_optimization.leaf_module") or {}
        mark_configured(model, *(leaves.get(key) or () for key in ("classes", "names", "name_suffixes")))


def _log_settings(settings: DeepSpeedConfig, ours: Engine) -> None:
    """Log the translation of the configuration and, if ``dump_state`` is set, the Plan and every key, on one rank."""
    if not ours.is_main:
        return
    _log.info("DeepSpeed's configuration: %s", settings.translation.summary())
    if settings.value("dump_state"):
        lines = [f"{path}: {settings.value(path)!r}" for path in sorted(settings.translation.values)]
        _log.warning("dump_state: %s\n%s", ours.plan, "\n".join(lines))


def _one_config(args: Any, config: Any, config_params: Any) -> Any:
    """Return the one configuration that was given.

    Raises:
        ConfigError: if several configurations were given, or none.
    """
    said = {
        "config": config,
        "config_params": config_params,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
        "args.deepscale_config": getattr(args, "deepscale_config", None),
    }
    found = {name: value for name, value in said.items() if value is not None}
    if len(found) > 1:
        raise DeepSpeedConfigError(
            f"deepspeed.initialize: given {' and '.join(found)}, which are one thing; keep one"
        )
    if not found:
        raise DeepSpeedConfigError(
            "deepspeed.initialize: no configuration; give config=..., or --deepspeed_config FILE to a script that "
            "calls add_config_arguments"
        )
    return next(iter(found.values()))


def _check_batch(settings: DeepSpeedConfig) -> None:
    """Raise DeepSpeedConfigError if the configuration has no batch size from which the others follow."""
    if not {"global_size", "micro_size"} & {*settings.translation.config.get("batch", {})}:
        raise DeepSpeedConfigError(
            "deepspeed.initialize: the configuration has neither train_batch_size nor train_micro_batch_size_per_gpu, "
            "from one of which the other numbers of the batch follow; give one"
        )


def _sequences_of(mpu: Any, mesh_param: Any, settings: DeepSpeedConfig) -> dict[str, Any]:
    """Return the part of the configuration that follows from the number of ranks that share a sequence.

    Raises:
        UsageError: if the arguments and the configuration give different numbers.
    """
    call = getattr(mpu, "get_sequence_parallel_world_size", None)
    sizes = [int(size) for size in mesh_param or ()]
    said = {
        "sequence_parallel_size": settings.translation.config.get("mesh", {}).get("cp", 1),
        "the mpu": 1 if call is None else int(call()),
        "mesh_param": sizes[1] if len(sizes) > 1 else 1,
    }
    asked = {name: size for name, size in said.items() if size > 1}
    if len({*asked.values()}) > 1:
        given = " and ".join(f"{size} ({name})" for name, size in asked.items())
        raise UsageError(
            f"deepspeed.initialize: the ranks that share a sequence are given as {given}; keep one number"
        )
    return {"mesh": {"cp": max(asked.values())}} if asked else {}


def _check_mesh(mpu: Any, settings: DeepSpeedConfig) -> None:
    """Raise UsageError if the mpu describes a mesh that the translated configuration does not have."""
    size, own = _asked_of(mpu, "world_size", 1), settings.translation.config.get("mesh", {}).get("tp", 1)
    if size not in (1, own):
        raise UsageError(
            f"deepspeed.initialize: an mpu with {size} model-parallel ranks beside autotp_size {own} cuts the model by "
            f'itself; leave the model whole, and say "tensor_parallel": {{"autotp_size": {size}}}'
        )


def _check_places(mpu: Any, ours: Engine) -> None:
    """Raise UsageError if ``mpu`` assigns another part of the model to this rank than the mesh does."""
    own = ours.plan.mesh.index("tp", ours.world.rank)
    place = _asked_of(mpu, "rank", own)
    if ours.agree(_asked_of(mpu, "world_size", 1) > 1 and place != own):
        ours.close()
        raise UsageError(
            f"deepspeed.initialize: the mpu says that this rank is {place} of its model-parallel ranks, the mesh says "
            f"{own}: ranks of one model follow one another here; leave mpu out"
        )


def _asked_of(mpu: Any, what: str, default: int) -> int:
    """Return ``what`` (rank or size) of the model-parallel group, under the name that ``mpu`` has for that group."""
    if hasattr(mpu, "get_sequence_parallel_world_size") and not hasattr(
        mpu, "get_tensor_model_parallel_rank"
    ):
        return default  # its ranks share sequences, not matrices
    for name in ("tensor_model_parallel", "slice_parallel", "model_parallel"):
        call = getattr(mpu, f"get_{name}_{what}", None)
        if call is not None:
            return int(call())
    return default


def _pipeline_of(model: nn.Module, settings: DeepSpeedConfig) -> dict[str, Any]:
    """Return the part of the configuration that follows from a PipelineModule; empty for other models. Collective.

    Raises:
        DeepSpeedConfigError: if ``pipeline.stages`` differs from the module's ``num_stages``.
        UsageError: if the ranks do not form pipelines of that many stages.
    """
    if not isinstance(model, PipelineModule):
        return {}
    stages = settings.value("pipeline.stages")
    if stages not in ("auto", model.num_stages):
        raise DeepSpeedConfigError(
            f"pipeline.stages: {stages}, but the PipelineModule has num_stages {model.num_stages}; keep one"
        )
    said = model.begin()
    interval = (
        settings.value("pipeline.activation_checkpoint_interval") or model.activation_checkpoint_interval
    )
    names = model.recomputed() if interval else []
    return said | {"recompute": {"scope": "full", "blocks": names} if names else {}}


def _experts_of(model: nn.Module, settings: DeepSpeedConfig) -> dict[str, Any]:
    """Return the part of the configuration that follows from the model's layers of experts.

    Raises:
        UsageError: if the configuration cuts such a model by tensor parallelism too.
    """
    mesh = settings.translation.config.get("mesh", {})
    if mesh.get("tp", 1) > 1 and layers_of(model):
        raise UsageError(
            f"deepspeed.initialize: a model with deepspeed.moe.layer.MoE over {mesh['tp']} ranks of tensor "
            "parallelism, each of which would see a part of the tokens that l_aux is of; use "
            "shardwise.MixtureOfExperts with RouterPolicy(balance='loss') in its place"
        )
    ep = expert_ranks(model, mesh.get("ep", 1), "deepspeed.initialize")
    return {"mesh": {"ep": ep}} if ep > 1 else {}


def _run_config(settings: DeepSpeedConfig, *said: Mapping[str, Any]) -> RunConfig:
    """Return the run configuration: the translated one plus what the model requires (``said``).

    The blocks ``optimizer`` and ``schedule`` are left out, because the optimizer and scheduler objects replace them.
    """
    ours = {
        key: value
        for key, value in settings.translation.config.items()
        if key not in ("optimizer", "schedule")
    }
    # DeepSpeed accepts ranks whose loaders were not divided and so train on the same data; so accept them too.
    ours["batch"] = {**ours.get("batch", {}), "duplicates": "allow"}
    for block, values in (item for each in said for item in each.items()):
        if values:
            ours[block] = {**ours.get(block, {}), **values}
    return RunConfig.parse(ours)


# The optimizer -----------------------------------------------------------------------------------------------------


def _optimizer_of(
    model: nn.Module, settings: DeepSpeedConfig, given: Optimizer, parameters: Iterable[Any] | None
) -> optim.Optimizer | None:
    groups = None if parameters is None else _trained(parameters)
    if isinstance(given, optim.Optimizer):
        made = given
    elif given is not None and not callable(given):
        raise UsageError(
            f"deepspeed.initialize: optimizer is {given!r:.100}; give one of torch's, a function of the parameters, or "
            "name it in the configuration (optimizer.type)"
        )
    elif given is not None:
        made = given(groups if groups is not None else [p for p in model.parameters() if p.requires_grad])
    elif settings.value("optimizer.type") is not None:
        made = _named(model, settings, groups if groups is not None else _trained(model.parameters()))
    else:
        return None
    made.param_groups[:] = [group for group in made.param_groups if group["params"]]
    _freeze_others(model, made)
    return made


def _trained(parameters: Iterable[Any]) -> list[Any]:
    """Return parameters, or groups of parameters, without those that do not require gradients."""
    found: list[Any] = []
    for each in parameters:
        if isinstance(each, Mapping):
            inner = each["params"]
            inner = [inner] if isinstance(inner, torch.Tensor) else list(inner)
            if kept := [p for p in inner if p.requires_grad]:
                found.append({**each, "params": kept})
        elif isinstance(each, tuple):  # (name, parameter), which torch accepts too
            found += [each] if each[1].requires_grad else []
        elif each.requires_grad:
            found.append(each)
    return found


def _named(model: nn.Module, settings: DeepSpeedConfig, given: list[Any]) -> optim.Optimizer:
    """Build the optimizer that ``optimizer:`` names; keys of a parameter group override those of the configuration."""
    policy = RunConfig.parse({"optimizer": settings.translation.config["optimizer"]}).optimizer
    rules, names = policy.rules(), {id(p): name for name, p in model.named_parameters()}
    groups = [each for each in given if isinstance(each, Mapping)]
    loose = [each[1] if isinstance(each, tuple) else each for each in given if not isinstance(each, Mapping)]
    found: list[dict[str, Any]] = []
    for group in [{"params": loose}, *groups]:
        by_rule: dict[int, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            # A rule for matrices applies to every 2-D parameter that no pattern of the policy excludes.
            place = policy.rule_of(names.get(id(parameter), ""), True if parameter.dim() == 2 else None)
            by_rule.setdefault(place, []).append(parameter)
        own = {key: value for key, value in group.items() if key != "params"}
        found += [
            {"type": rules[place][0], **rules[place][1], **own, "params": by_rule[place]}
            for place in sorted(by_rule)
        ]
    return NamedRules(found)


def _freeze_others(model: nn.Module, optimizer: optim.Optimizer) -> None:
    """Stop the training of parameters that the optimizer does not contain, and log their names."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    others = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in held]
    for name in others:
        model.get_parameter(name).requires_grad_(False)
    if others:
        _log.warning(
            "deepspeed.initialize: %d parameters are not in the optimizer and do not train: %s",
            len(others),
            ", ".join(others[:5]),
        )


# The scheduler -----------------------------------------------------------------------------------------------------


def _scheduler_of(settings: DeepSpeedConfig, optimizer: optim.Optimizer | None, given: Any) -> Any:
    _check_scheduler(given, optimizer)
    if given is not None:
        return given(optimizer) if callable(given) and not hasattr(given, "step") else given
    said = settings.translation.config.get("schedule")
    if said is None:
        return None
    if optimizer is None:
        raise DeepSpeedConfigError("scheduler: there is no optimizer whose rates it could set; name one")
    return scheduler_of(RunConfig.parse({"schedule": said}).schedule, optimizer)


def _check_scheduler(given: Any, optimizer: optim.Optimizer | None) -> None:
    """Raise UnmetError if a scheduler object changes the rates of another optimizer than the engine's."""
    groups = getattr(getattr(given, "optimizer", None), "param_groups", None)
    if groups is None:
        return
    own = () if optimizer is None else optimizer.param_groups
    if not {id(group) for group in groups} & {id(group) for group in own}:
        raise UnmetError(
            f"deepspeed.initialize: lr_scheduler, a {type(given).__name__}, sets the rates of another optimizer than "
            "the one that trains; give initialize that optimizer too, or a function of the optimizer as lr_scheduler"
        )
