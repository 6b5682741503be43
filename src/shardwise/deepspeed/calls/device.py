"""``deepspeed.accelerator.get_accelerator()``: facts about the device of a process, taken from torch.

One class serves every device: an attribute that the class lacks is looked up in torch's module of the device
(``torch.cuda``, ``torch.xpu``). On a CPU, methods for device memory and streams do nothing or report the process's
own memory.
"""

import contextlib
import resource
from functools import cache
from typing import Any

import torch

from shardwise.comm.world import ranks_of_host

_TYPES = {
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
}
_NOTHING_ON_CPU = frozenset(
    {
        "empty_cache",
        "reset_peak_memory_stats",
        "reset_max_memory_allocated",
        "reset_max_memory_cached",
        "set_device",
        "synchronize",
        "range_push",
        "range_pop",
        "default_stream",
        "register_host_memory",
        "unregister_host_memory",
    }
)
_PEAK = frozenset({"max_memory_allocated", "max_memory_reserved", "max_memory_cached"})
_HELD = frozenset({"memory_allocated", "memory_reserved", "memory_cached"})


class DeepSpeedAccelerator:
    """The device of this process; attributes that the class lacks are looked up in torch's module of the device."""

    def __init__(self, kind: str):
        self._kind = kind
        self._name = kind
        self._communication_backend_name = "nccl" if kind == "cuda" else "gloo"

    @property
    def _is_cpu(self) -> bool:
        return self._kind == "cpu"

    def device_name(self, device_index: int | None = None) -> str:
        """Return the device's name for ``.to()``, such as ``cuda:1``; a CPU has no index."""
        return self._kind if device_index is None or self._is_cpu else f"{self._kind}:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        """Return a context in which tensors are made on the device."""
        return (
            contextlib.nullcontext()
            if self._is_cpu
            else torch.get_device_module(self._kind).device(device_index)
        )

    def current_device(self) -> int:
        """Return the index of the current device."""
        return 0 if self._is_cpu else torch.accelerator.current_device_index()

    def current_device_name(self) -> str:
        """Return the name of the current device, with its index."""
        return self.device_name(self.current_device())

    def device_count(self) -> int:
        """Return the number of devices of this host; of CPUs, the number of ranks on this host."""
        return ranks_of_host() if self._is_cpu else torch.accelerator.device_count()

    def is_available(self) -> bool:
        """Return True: every process has a device, at least the CPU."""
        return True

    def communication_backend_name(self) -> str:
        """Return the name of the communication backend of the device: ``nccl`` or ``gloo``."""
        return self._communication_backend_name

    def is_synchronized_device(self) -> bool:
        """Return whether a call returns only when its work is done, which is true on a CPU."""
        return self._is_cpu

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    def is_bf16_supported(self) -> bool:
        """Return whether the device computes in bfloat16."""
        return self._is_cpu or bool(
            getattr(torch.get_device_module(self._kind), "is_bf16_supported", lambda: True)()
        )

    def is_fp16_supported(self) -> bool:
        """Return True: every device computes in float16."""
        return True

    def is_fp64_supported(self) -> bool:
        """Return whether the device computes in float64."""
        return self._kind != "mps"

    def is_triton_supported(self) -> bool:
        """Return whether Triton has a compiler for the device."""
        return self._kind == "cuda"

    def supported_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes in which the device computes."""
        return [torch.float, torch.half, torch.bfloat16]

    def random(self) -> Any:
        """Return torch's module of random number generators."""
        return torch.random

    def manual_seed(self, seed: int) -> Any:
        """Seed the generator of the current device."""
        return (
            torch.manual_seed(seed) if self._is_cpu else torch.get_device_module(self._kind).manual_seed(seed)
        )

    def manual_seed_all(self, seed: int) -> Any:
        """Seed the generators of all devices."""
        return (
            torch.manual_seed(seed)
            if self._is_cpu
            else torch.get_device_module(self._kind).manual_seed_all(seed)
        )

    def initial_seed(self) -> int:
        """Return the seed of the device's generator."""
        return torch.initial_seed() if self._is_cpu else torch.get_device_module(self._kind).initial_seed()

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """Return the state of the device's generator."""
        own: torch.Tensor = (
            torch.get_rng_state()
            if self._is_cpu
            else torch.get_device_module(self._kind).get_rng_state(self._index(device_index))
        )
        return own

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        """Set the state of the device's generator."""
        if self._is_cpu:
            torch.set_rng_state(new_state)
        else:
            torch.get_device_module(self._kind).set_rng_state(new_state, self._index(device_index))

    def _index(self, given: int | None) -> int:
        return self.current_device() if given is None else given

    def total_memory(self, device_index: int | None = None) -> int:
        """Return the bytes of the device's memory, or of the host's memory for a CPU."""
        if not self._is_cpu:
            return int(torch.get_device_module(self._kind).mem_get_info(self._index(device_index))[1])
        with open("/proc/meminfo", encoding="ascii") as file:
            return int(file.readline().split()[1]) << 10

    def available_memory(self, device_index: int | None = None) -> int:
        """Return the free bytes of the device's memory, or of the host's memory for a CPU."""
        if not self._is_cpu:
            return int(torch.get_device_module(self._kind).mem_get_info(self._index(device_index))[0])
        with open("/proc/meminfo", encoding="ascii") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) << 10

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """Return a copy of ``tensor`` in page-locked memory; on a CPU, return the tensor itself."""
        return tensor if self._is_cpu else tensor.pin_memory()

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is in page-locked memory, which is always True on a CPU."""
        return self._is_cpu or tensor.is_pinned()

    def unpin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor as it is: torch frees page-locked memory together with the tensor."""
        return tensor

    def pin_empty(self, *size: Any, **options: Any) -> torch.Tensor:
        """Return an uninitialized tensor in page-locked memory; on a CPU, in ordinary memory."""
        return torch.empty(*size, pin_memory=not self._is_cpu, **options)

    def pin_empty_like(self, tensor: torch.Tensor, **options: Any) -> torch.Tensor:
        """Return an uninitialized tensor in page-locked memory with the shape and dtype of ``tensor``."""
        return self.pin_empty(tensor.shape, dtype=tensor.dtype, **options)

    def pin_memory_alignment(self) -> int:
        """Return 1: torch chooses the alignment of page-locked memory."""
        return 1

    def default_generator(self, device_index: int = 0) -> torch.Generator:
        """Return the generator of a device."""
        own = torch.get_device_module(self._kind)
        return torch.default_generator if self._is_cpu else own.default_generators[device_index]

    def is_current_stream_capturing(self) -> bool:
        """Return whether a graph is being captured on the device's current stream."""
        return not self._is_cpu and bool(torch.get_device_module(self._kind).is_current_stream_capturing())

    def create_graph(self) -> Any:
        """Return a new graph of the device; None on a CPU."""
        return None if self._is_cpu else torch.get_device_module(self._kind).CUDAGraph()

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> Any:
        """Return a context that records into ``graph``; on a CPU, a context that does nothing."""
        if self._is_cpu:
            return contextlib.nullcontext()
        return torch.get_device_module(self._kind).graph(graph, pool, stream)

    def replay_graph(self, graph: Any) -> None:
        """Run the calls that were recorded in ``graph``."""
        if graph is not None:
            graph.replay()

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is on this kind of device."""
        return tensor.device.type == self._kind

    def lazy_call(self, callback: Any) -> Any:
        """Call ``callback`` at once and return its result."""
        return callback()

    def visible_devices_envs(self) -> list[str]:
        """Return the environment variables that select the devices of a process."""
        return [] if self._is_cpu else ["CUDA_VISIBLE_DEVICES"]

    def get_compile_backend(self) -> str:
        """Return the default backend of torch.compile."""
        return "inductor"

    def set_compile_backend(self, backend: str) -> None:
        """Do nothing: ``compile`` in the configuration names the backend."""

    def set_visible_devices_envs(self, current_env: dict[str, str], local_accelerator_ids: list[int]) -> None:
        """Write the devices of a process into ``current_env``, the environment with which it will be started."""
        for name in self.visible_devices_envs():
            current_env[name] = ",".join(map(str, local_accelerator_ids))

    def export_envs(self) -> list[str]:
        """Return an empty list: the launcher passes on all environment variables."""
        return []

    def op_builder_dir(self) -> str:
        """Return DeepSpeed's module of kernel builders; ``create_op_builder`` builds none of them."""
        return "deepspeed.ops.op_builder"

    def prefer_triton_grouped_mm(self) -> bool:
        """Return False: matrix products of experts use torch's operations."""
        return False

    def create_op_builder(self, class_name: str) -> None:
        """Return None: there is no kernel to build, because every operation is torch's."""

    get_op_builder = create_op_builder

    def build_extension(self) -> Any:
        """Return torch's ``BuildExtension``, for extensions of a script's own."""
        from torch.utils.cpp_extension import BuildExtension

        return BuildExtension

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _TYPES:
            return lambda values: torch.tensor(values, dtype=_TYPES[name], device=self._kind)
        if self._is_cpu and name in _NOTHING_ON_CPU:
            return lambda *args, **kwargs: None
        if self._is_cpu and name in _PEAK | _HELD:
            return lambda *args: _process_bytes(name in _PEAK)
        module = torch.get_device_module(self._kind)
        if self._is_cpu and name == "memory_stats":
            return lambda *args: {}
        return getattr(module, name)


class CPU_Accelerator(DeepSpeedAccelerator):  # noqa: N801
    """The CPU, whatever other devices there are."""

    def __init__(self) -> None:
        super().__init__("cpu")


class CUDA_Accelerator(DeepSpeedAccelerator):  # noqa: N801
    """The CUDA device of this process."""

    def __init__(self) -> None:
        super().__init__("cuda")


def _process_bytes(is_peak: bool) -> int:
    """Return the resident memory of this process in bytes, now or at its peak."""
    with open("/proc/self/statm", encoding="ascii") as file:
        now = int(file.read().split()[1]) * resource.getpagesize()
    # The kernel updates the peak only now and then, so the current value may be larger.
    return max(now, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) if is_peak else now


@cache
def get_accelerator() -> DeepSpeedAccelerator:
    """Return the device of this process: torch's accelerator if there is one, else the CPU."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return DeepSpeedAccelerator("cpu" if found is None else found.type)


def is_current_accelerator_supported() -> bool:
    """Return True: every device that torch supports is supported."""
    return True


def set_accelerator(accelerator: Any) -> None:
    """Do nothing: torch determines the device."""
