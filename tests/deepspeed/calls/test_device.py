"""What scripts ask of the device, the ranks and the seeds."""

from collections.abc import Callable

import pytest
import torch

import shardwise.deepspeed as deepspeed
from shardwise.base.errors import UsageError
from shardwise.comm.world import World
from shardwise.deepspeed.calls.device import DeepSpeedAccelerator
from tests.ranks import RankPool

ASKED = [
    "BFloat16Tensor",
    "ByteTensor",
    "DoubleTensor",
    "Event",
    "FloatTensor",
    "HalfTensor",
    "IntTensor",
    "LongTensor",
    "Stream",
    "available_memory",
    "build_extension",
    "capture_to_graph",
    "communication_backend_name",
    "create_graph",
    "create_op_builder",
    "current_device",
    "current_device_name",
    "current_stream",
    "default_generator",
    "default_stream",
    "device",
    "device_count",
    "device_name",
    "empty_cache",
    "export_envs",
    "get_compile_backend",
    "get_op_builder",
    "get_rng_state",
    "handles_memory_backpressure",
    "initial_seed",
    "is_available",
    "is_bf16_supported",
    "is_current_stream_capturing",
    "is_fp16_supported",
    "is_fp64_supported",
    "is_pinned",
    "is_synchronized_device",
    "is_triton_supported",
    "lazy_call",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "max_memory_cached",
    "max_memory_reserved",
    "memory_allocated",
    "memory_cached",
    "memory_reserved",
    "memory_stats",
    "on_accelerator",
    "op_builder_dir",
    "pin_empty",
    "pin_empty_like",
    "pin_memory",
    "pin_memory_alignment",
    "prefer_triton_grouped_mm",
    "random",
    "range_pop",
    "range_push",
    "register_host_memory",
    "replay_graph",
    "reset_max_memory_allocated",
    "reset_max_memory_cached",
    "reset_peak_memory_stats",
    "resolves_data_dependency",
    "set_compile_backend",
    "set_device",
    "set_rng_state",
    "set_visible_devices_envs",
    "stream",
    "supported_dtypes",
    "synchronize",
    "total_memory",
    "unpin_memory",
    "unregister_host_memory",
    "use_host_timers",
    "visible_devices_envs",
]
"""Of DeepSpeed's abstract accelerator."""


def test_everything_that_is_asked_of_a_device() -> None:
    device = DeepSpeedAccelerator("cpu")
    assert all(hasattr(device, name) for name in ASKED)
    assert device.device_name(3) == "cpu" and device.communication_backend_name() == "gloo"
    assert device.HalfTensor([1, 2]).dtype is torch.float16 and device.pin_empty(2, 3).shape == (2, 3)
    assert 0 < device.memory_allocated() <= device.max_memory_allocated() < device.total_memory()
    assert device.synchronize() is None and device.on_accelerator(torch.zeros(1))


def test_one_process_is_a_job_of_one() -> None:
    comm = deepspeed.comm
    assert not comm.is_initialized() and (comm.get_rank(), comm.get_world_size()) == (0, 1)
    deepspeed.init_distributed()
    total = torch.ones(2)
    comm.all_reduce(total, op=comm.ReduceOp.SUM)
    comm.barrier()
    assert deepspeed.utils.groups.get_data_parallel_group() is comm.group.WORLD
    assert comm.is_initialized() and total.tolist() == [1, 1] and comm.get_all_ranks_from_group() == [0]


def test_seeds_and_streams_of_random_numbers() -> None:
    deepspeed.runtime.utils.set_random_seed(7)
    first = torch.rand(2)
    tracker = deepspeed.checkpointing.get_cuda_rng_tracker()
    deepspeed.checkpointing.model_parallel_cuda_manual_seed(7)
    with tracker.fork():
        own = torch.rand(2)
    assert torch.equal(torch.rand(2), first) and not torch.equal(own, first)


def test_a_checkpointed_function_has_its_gradients() -> None:
    x = torch.arange(3.0, requires_grad=True)
    deepspeed.checkpointing.checkpoint(lambda y: y.square().sum(), x).backward()
    assert x.grad is not None and x.grad.tolist() == [0, 2, 4]


def test_topologies_count_as_arrays_do() -> None:
    from shardwise.deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology, ProcessTopology

    plain = ProcessTopology(axes=["pipe", "data"], dims=[2, 3])
    assert plain.get_axis_comm_lists("pipe") == [[0, 3], [1, 4], [2, 5]]
    assert plain.get_axis_comm_lists("data") == [[0, 1, 2], [3, 4, 5]]
    cube = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    assert [cube.get_rank(**cube.get_coord(rank)._asdict()) for rank in range(8)] == list(range(8))
    assert cube.filter_match(pipe=0, data=1) == [2, 3] and cube.get_rank_repr(3) == "model_01"
    assert cube.get_axis_comm_lists("none") == [] and cube.get_dim("none") == 0


def test_a_models_forward_pass_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    from shardwise.deepspeed.profiling.flops_profiler import FlopsProfiler, get_model_profile

    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    products = 5 * (8 * 16 + 16 * 4)
    assert get_model_profile(model, (5, 8), as_string=False) == (
        2 * products,
        products,
        8 * 16 + 16 + 16 * 4 + 4,
    )
    assert model.training and "Linear" in capsys.readouterr().out
    profiler = FlopsProfiler(model)
    with pytest.raises(UsageError, match="start_profile"):
        profiler.get_total_flops()
    with pytest.raises(UsageError, match="no input"):
        get_model_profile(model)


def some_of_the_ranks(world: World) -> str:
    with pytest.raises(UsageError, match="new_group") as refused:
        deepspeed.utils.groups.get_tensor_model_parallel_group()
    return str(refused.value)


def test_a_group_of_some_ranks_is_not_taken_for_all(ranks: Callable[[int], RankPool]) -> None:
    """torch takes None for all ranks: a sum over the wrong ones would say nothing."""
    assert all("1 tensor-parallel ranks are some of 2" in told for told in ranks(2).run(some_of_the_ranks))
