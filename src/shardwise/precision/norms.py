"""Norms that keep fp32 weights under 16-bit compute: those with running statistics.

    y = (x - mean) / sqrt(var + eps) · weight + bias        x and y in 16 bits; mean, var, weight, bias in fp32

Statistics are averages over many steps, which 16 bits would not move any more, so buffers are never cast; and torch's
batch norm takes weights of the dtype of its statistics beside a 16-bit input. It is what autocast does too.
"""

from torch import nn

from shardwise.precision.policy import SIXTEEN_BITS, PrecisionPolicy


def norms_with_statistics(model: nn.Module) -> list[str]:
    """Names of modules that hold weights beside floating running statistics wider than 16 bits."""
    found = []
    for name, module in model.named_modules():
        statistics = [buffer for buffer in module._buffers.values() if buffer is not None]
        is_norm = isinstance(module, nn.modules.batchnorm._NormBase) or "Norm" in type(module).__name__
        has_weights = any(parameter is not None for parameter in module._parameters.values())
        is_wide = any(each.is_floating_point() and each.dtype not in SIXTEEN_BITS for each in statistics)
        if is_norm and has_weights and is_wide:
            found.append(name)
    return found


def with_wide_norms(policy: PrecisionPolicy, model: nn.Module) -> tuple[PrecisionPolicy, tuple[str, ...]]:
    """The policy under which they keep fp32 weights, and a line that says so."""
    if policy.compute_dtype not in SIXTEEN_BITS:
        return policy, ()
    norms = norms_with_statistics(model)
    if not norms:
        return policy, ()
    names = [
        f"{norm}.{name}" if norm else name for norm in norms for name in model.get_submodule(norm)._parameters
    ]
    literal = [name.replace("[", "[[]").replace("*", "[*]").replace("?", "[?]") for name in names]
    note = (
        f"{len(norms)} norms with running statistics keep fp32 weights: {', '.join(norms[:4])}"
        f"{' ...' if len(norms) > 4 else ''}"
    )
    return policy.model_copy(update={"keep_fp32": [*policy.keep_fp32, *literal]}), (note,)
