"""``deepspeed.ops.op_builder``: a table of DeepSpeed's kernels that have a counterpart in torch or in this package.

No kernel is built: torch's operations run instead. ``is_compatible`` reports whether a counterpart exists, and
``load`` raises an error.
"""

from typing import Any, NoReturn

import torch

from shardwise.base.errors import UsageError


class OpBuilder:
    """A builder of one of DeepSpeed's kernels, which builds nothing."""

    NAME = ""
    """DeepSpeed's name of the kernel."""
    has_counterpart = False
    """True if torch or this package has an operation with the same result."""

    def is_compatible(self, verbose: bool = False) -> bool:
        """Return True if torch or this package has a counterpart of the kernel."""
        return self.has_counterpart

    def load(self, verbose: bool = False) -> NoReturn:
        """Raise UsageError: there is no kernel to load."""
        raise UsageError(
            f"deepspeed {type(self).__name__}.load: there are no kernels of DeepSpeed's here; torch's own operations "
            "are used, and compile: blocks fuses them"
        )

    builder = load

    @staticmethod
    def installed_rocm_version() -> tuple[int, int]:
        """Return the version of ROCm that torch was built for; (0, 0) for another build."""
        found = (torch.version.hip or "0.0").split(".")
        return int(found[0]), int(found[1])

    @staticmethod
    def is_rocm_pytorch() -> bool:
        """Return True if torch was built for ROCm."""
        return torch.version.hip is not None

    def absolute_name(self) -> str:
        """Return the name that DeepSpeed gives the built kernel."""
        return f"deepspeed.ops.{self.NAME}"


def _made(name: str, kernel: str, is_here: bool) -> type[OpBuilder]:
    said = {
        "NAME": kernel,
        "has_counterpart": is_here,
        "__doc__": f"The kernel {kernel}.",
        "__module__": __name__,
    }
    return type(name, (OpBuilder,), said)


_HERE = {
    "CPUAdam": "cpu_adam",
    "FusedAdam": "fused_adam",
    "CPUAdagrad": "cpu_adagrad",
    "FusedLamb": "fused_lamb",
    "CPULion": "cpu_lion",
    "FusedLion": "fused_lion",
    "Utils": "utils",
}
_ELSEWHERE = {
    "AsyncIO": "async_io",
    "CCLComm": "deepspeed_ccl_comm",
    "EvoformerAttn": "evoformer_attn",
    "FPQuantizer": "fp_quantizer",
    "GDS": "gds",
    "Inference": "transformer_inference",
    "InferenceCoreOps": "inference_core_ops",
    "InferenceCutlass": "cutlass_ops",
    "NotImplemented": "deepspeed_not_implemented",
    "PinMemory": "pin_memory",
    "Quantizer": "quantizer",
    "RaggedOps": "ragged_device_ops",
    "RaggedUtils": "ragged_ops",
    "RandomLTD": "random_ltd",
    "ShareMemComm": "deepspeed_shm_comm",
    "SparseAttn": "sparse_attn",
    "SpatialInference": "spatial_inference",
    "StochasticTransformer": "stochastic_transformer",
    "Transformer": "transformer",
}
BUILDERS: dict[str, type[OpBuilder]] = {
    f"{name}Builder": _made(f"{name}Builder", kernel, name in _HERE)
    for name, kernel in {**_HERE, **_ELSEWHERE}.items()
}
"""The builder classes by name."""
__compatible_ops__ = {builder.NAME: builder.has_counterpart for builder in BUILDERS.values()}
__installed_ops__ = dict(__compatible_ops__)


def __getattr__(name: str) -> Any:
    if name in BUILDERS:
        return BUILDERS[name]
    raise AttributeError(
        f"deepspeed.ops.op_builder has no {name!r} here; it has {', '.join(sorted(BUILDERS))}"
    )
