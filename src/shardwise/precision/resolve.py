"""The tensors of a model to which a precision policy applies: modules by class, and norms that keep fp32 weights.

    class:LayerNorm, class:torch.nn.Linear     parameters and buffers in a module of the class, or of a derived class;
                                               with dots as in an import, or with ``*``
    norms with wide running statistics         y = (x - mean) / sqrt(var + eps) · weight + bias
                                               x and y in 16 bits; mean, var, weight, bias in fp32

Statistics are averages over many steps, and in 16 bits their updates would be lost, so buffers keep their dtype
unless ``precision.buffers`` gives another. torch's batch norm requires weights of the same dtype as its statistics if
the input is in 16 bits. autocast does the same.
"""

import sys
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from itertools import chain

from torch import nn

from shardwise.base.errors import ConfigError
from shardwise.precision.policy import SIXTEEN_BITS, PrecisionPolicy

CLASS = "class:"
"""The prefix of a pattern of classes."""


def resolved(policy: PrecisionPolicy, model: nn.Module) -> tuple[PrecisionPolicy, tuple[str, ...]]:
    """Return the policy with the names to which it applies in ``model``, and lines for the printed Plan.

    Args:
        policy: The policy as configured.
        model: The whole model.

    Raises:
        ConfigError: if the model recomputes parts of its passes by itself and ``operations`` is set.
    """
    itself = [name for name, each in model.named_modules() if getattr(each, "gradient_checkpointing", False)]
    if policy.operations and itself:
        raise ConfigError(
            f"precision.operations: {itself[0] or 'the model'} recomputes by itself (gradient_checkpointing is set), "
            "where the dtypes of operations are not known; call model.gradient_checkpointing_disable() and set "
            "recompute: full"
        )
    policy = policy.with_names(
        chain(
            (name for pattern in policy.keep_fp32 for name in names_of(pattern, model)),
            shared_buffers_of(model),
        ),
        (name for pattern in policy.narrow_reduce for name in names_of(pattern, model)),
    )
    if policy.compute_dtype not in SIXTEEN_BITS:
        return policy, ()
    norms = norms_with_statistics(policy, model)
    if not norms:
        return policy, ()
    names = [
        f"{norm}.{name}" if norm else name for norm in norms for name in model.get_submodule(norm)._parameters
    ]
    note = (
        f"{len(norms)} norms with running statistics keep fp32 weights: {', '.join(norms[:4])}"
        f"{' ...' if len(norms) > 4 else ''}"
    )
    return policy.with_names(names), (note,)


def shared_buffers_of(model: nn.Module) -> Iterator[str]:
    """Yield the names of the buffers that modules list in ``shared_buffers``.

    All ranks update these buffers equally, in steps that 16 bits would lose.
    """
    for prefix, module in model.named_modules():
        for name in getattr(type(module), "shared_buffers", ()):
            if module._buffers.get(name) is not None:
                yield f"{prefix}.{name}" if prefix else name


def names_of(pattern: str, model: nn.Module) -> Iterator[str]:
    """Yield the first names of the parameters and buffers that ``class:...`` matches; nothing for another pattern."""
    if not pattern.startswith(CLASS):
        return
    wanted = pattern.removeprefix(CLASS)
    classes: dict[type, bool] = {}
    first = {id(each): name for name, each in chain(model.named_parameters(), model.named_buffers())}
    for module in model.modules():
        if type(module) not in classes:
            names = _names_of_class(type(module))
            classes[type(module)] = any(fnmatchcase(name, wanted) for name in names)
        if classes[type(module)]:
            for each in chain(module.parameters(), module.buffers()):
                yield first[id(each)]


def _names_of_class(kind: type) -> Iterator[str]:
    """Yield the names of a class and its bases: ``Linear``, ``torch.nn.modules.linear.Linear``, ``torch.nn.Linear``."""
    for each in kind.__mro__:
        yield each.__name__
        package = each.__module__
        while package:
            if getattr(sys.modules.get(package), each.__name__, None) is each or package == each.__module__:
                yield f"{package}.{each.__name__}"
            package = package.rpartition(".")[0]


def norms_with_statistics(policy: PrecisionPolicy, model: nn.Module) -> list[str]:
    """Return the names of modules with weights and floating running statistics that are wider than 16 bits."""
    found = []
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        statistics: Iterable[str] = [key for key, buffer in module._buffers.items() if buffer is not None]
        dtypes = [policy.buffer_dtype(prefix + key, module.get_buffer(key).dtype) for key in statistics]
        is_norm = isinstance(module, nn.modules.batchnorm._NormBase) or "Norm" in type(module).__name__
        has_weights = any(parameter is not None for parameter in module._parameters.values())
        is_wide = any(dtype.is_floating_point and dtype not in SIXTEEN_BITS for dtype in dtypes)
        if is_norm and has_weights and is_wide:
            found.append(name)
    return found
