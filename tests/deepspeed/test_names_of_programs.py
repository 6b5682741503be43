"""Names that programs around DeepSpeed import: constants, models of configuration blocks, schedules, hosts, parts that
are absent."""

import pytest
import torch

import shardwise.deepspeed as deepspeed
from shardwise.base.errors import UsageError


def test_constants_and_versions() -> None:
    from shardwise.deepspeed.git_version_info import torch_info, version
    from shardwise.deepspeed.runtime.config import ADAM_OPTIMIZER, ONEBIT_ADAM_OPTIMIZER
    from shardwise.deepspeed.runtime.lr_schedules import WARMUP_LR, WARMUP_MIN_LR
    from shardwise.deepspeed.utils.torch import required_torch_version

    assert (WARMUP_LR, WARMUP_MIN_LR, ADAM_OPTIMIZER) == ("WarmupLR", "warmup_min_lr", "adam")
    assert ONEBIT_ADAM_OPTIMIZER == "onebitadam" and version == deepspeed.__version__
    assert torch.__version__.startswith(torch_info["version"]) and required_torch_version(min_version=2.1)


def test_questions_about_parts_that_are_absent() -> None:
    from shardwise.deepspeed.compile.util import is_deepcompile_supported
    from shardwise.deepspeed.ops.triton_ops import is_triton_available

    assert not is_deepcompile_supported() and not is_triton_available()


def test_an_absent_part_is_an_attribute_of_the_package_too() -> None:
    with pytest.raises(UsageError, match=r"elasticity\.compute_elastic_config"):
        deepspeed.elasticity.compute_elastic_config({})


def test_words_of_checkpoints() -> None:
    from shardwise.deepspeed.checkpoint import UNIVERSAL_CHECKPOINT_INFO
    from shardwise.deepspeed.checkpoint.constants import CAT_DIM, DS_VERSION, MODEL_FILE_PREFIX
    from shardwise.deepspeed.runtime.swap_tensor import MIN_SWAPPABLE_BYTES

    assert (UNIVERSAL_CHECKPOINT_INFO, MODEL_FILE_PREFIX) == ("universal_checkpoint_info", "mp_rank_")
    assert (CAT_DIM, DS_VERSION, MIN_SWAPPABLE_BYTES) == ("cat_dim", "ds_version", 1 << 20)


def test_getters_of_keys() -> None:
    from shardwise.deepspeed.runtime.config import get_gradient_clipping, get_optimizer_name

    assert get_gradient_clipping({}) == 1.0 and get_gradient_clipping({"gradient_clipping": 0.0}) == 0.0
    assert get_optimizer_name({"optimizer": {"type": "Lamb"}}) == "Lamb" and get_optimizer_name({}) is None


def test_accelerators_by_class() -> None:
    from shardwise.deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
    from shardwise.deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    assert CPU_Accelerator().device_name() == "cpu" and CUDA_Accelerator().device_name() == "cuda"
    assert isinstance(CPU_Accelerator(), deepspeed.accelerator.DeepSpeedAccelerator)


def test_sizes_of_a_batch_follow_from_one_another() -> None:
    config = deepspeed.DeepSpeedConfig({"train_batch_size": 64})
    assert (config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps) == (64, 1)
    config.train_batch_size, config.train_micro_batch_size_per_gpu = 64, 16
    config._configure_train_batch_size()
    assert config.gradient_accumulation_steps == 4
    config.train_batch_size = 33
    with pytest.raises(deepspeed.DeepSpeedConfigError, match="give two of them that divide"):
        config._configure_train_batch_size()
    for error in (ValueError, AssertionError):
        with pytest.raises(error, match="unknown key"):
            deepspeed.DeepSpeedConfig({"train_batch_sise": 3})
    with pytest.raises(AssertionError, match="model is required"):
        deepspeed.initialize(config={"train_batch_size": 1})


def test_parts_of_equal_weight() -> None:
    from shardwise.deepspeed.runtime.utils import partition_balanced

    assert partition_balanced([1, 1, 1, 1, 0, 1], 3)[-1] == 6
    borders = partition_balanced([5, 1, 1, 1, 1, 1], 2)
    assert borders == [0, 1, 6]
