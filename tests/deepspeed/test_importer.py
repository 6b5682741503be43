"""DeepSpeed's dotted paths come out of one table."""

import importlib
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest
import torch

import shardwise
import shardwise.deepspeed as deepspeed
from shardwise.base.errors import UsageError
from shardwise.deepspeed import importer
from shardwise.deepspeed.names import NAMES, OTHERS, UnsupportedName

ROWS = [(path, name) for path, rows in NAMES.items() for name in rows]


def test_every_row_has_a_home() -> None:
    for path, name in ROWS:
        module = importlib.import_module(f"shardwise.deepspeed.{path}".rstrip("."))
        found = getattr(module, name)
        assert found is importer.attribute("shardwise.deepspeed", path, name)
    assert deepspeed.comm.ReduceOp is not None, "all other names of torch.distributed"


def test_names_are_imported_and_reached_by_attributes() -> None:
    from shardwise.deepspeed.ops.adam import FusedAdam
    from shardwise.deepspeed.runtime.lr_schedules import WarmupLR

    assert deepspeed.ops.adam.FusedAdam is FusedAdam
    assert deepspeed.runtime.lr_schedules.WarmupLR is WarmupLR
    assert "FusedAdam" in dir(deepspeed.ops.adam) and "ops" in dir(deepspeed)


def test_no_file_of_ours_has_the_name_of_a_path() -> None:
    """It would be found in place of the table's rows, or the other way round."""
    files = {file.stem for file in Path(importer.__file__).parent.glob("*.py")}
    assert not files & {path.partition(".")[0] for path in {*NAMES, *OTHERS}}
    assert not files & set(NAMES[""]), "importing the file would put it in the name's place"


def test_a_name_wins_over_a_module_of_the_same_name() -> None:
    importlib.import_module("shardwise.deepspeed.utils.z3_leaf_module")
    assert callable(deepspeed.utils.z3_leaf_module)
    assert not {path for path in importer.paths() if path in NAMES[""]}, (
        "the package itself is no table module"
    )


@pytest.mark.parametrize(
    ("statement", "near"),
    [
        ("import shardwise.deepspeed.runtme", "'runtime'"),
        ("from shardwise.deepspeed.utils import loger", "'logger'"),
        ("from shardwise.deepspeed.runtime import WarmupLR", "deepspeed.runtime.lr_schedules"),
        ("from shardwise.deepspeed.nowhere.at_all import x", "docs/deepspeed.md"),
    ],
)
def test_what_is_not_there_says_what_is_near(statement: str, near: str) -> None:
    with pytest.raises(ImportError, match=near):
        exec(statement)


def test_an_attribute_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="did you mean 'initialize'"):
        deepspeed.initialise  # noqa: B018


def test_what_is_not_supported_may_be_imported_and_says_so_when_used() -> None:
    from shardwise.deepspeed.moe.sharded_moe import TopKGate

    assert not isinstance(3, TopKGate)
    with pytest.raises(UsageError, match="use moe.layer.MoE"):
        TopKGate(4, 2)
    refused = [name for path, name in ROWS if isinstance(NAMES[path][name], UnsupportedName)]
    assert len(refused) < len(ROWS) / 3


def test_under_the_name_of_deepspeed() -> None:
    """What ``launch --as-deepspeed`` puts on the path hands the name over; torch without CUDA takes cuda for the CPU,
    in that process alone. Two forks that meet by nccl, as such scripts say."""
    shardwise.initialize  # noqa: B018  imported once, here
    before = torch.Tensor.to
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of any fork beside a thread
        assert shardwise.launch(_as_deepspeed, ranks=2, every=True) == [2.0, 2.0]
    assert torch.Tensor.to is before and "deepspeed" not in sys.modules


def _as_deepspeed() -> float:
    package = ModuleType("deepspeed")
    package.__path__ = []
    sys.modules["deepspeed"] = package
    importer.answer_as("deepspeed")
    exec(_SCRIPT)
    return float(torch.distributed.get_world_size())


_SCRIPT = """
import deepspeed, torch
from deepspeed.ops.adam import FusedAdam
import deepspeed.runtime.lr_schedules as schedules

assert deepspeed.zero.GatheredParameters and deepspeed.__version__ == "0.19.8"
assert schedules.__name__ == "deepspeed.runtime.lr_schedules"
torch.cuda.set_device(1)
assert torch.zeros(2, device="cuda").to(1).cuda().device.type == "cpu"
assert torch.nn.Linear(2, 2).cuda().to("cuda:1").weight.device.type == "cpu"
assert torch.zeros(2).to(torch.float64).dtype is torch.float64
deepspeed.init_distributed("nccl")
assert torch.distributed.get_backend() == "gloo"
total = torch.ones(1)
deepspeed.comm.all_reduce(total)
assert total.item() == 2
try:
    import deepspeed.nothing
except ImportError as error:
    assert "docs/deepspeed.md" in str(error)
else:
    raise AssertionError
"""
