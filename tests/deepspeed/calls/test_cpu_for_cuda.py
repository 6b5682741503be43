"""A script under ``--as-deepspeed`` on a machine without CUDA: torch's wrapped functions keep torch's other habits.

Each body runs in a process of its own, because the wrapping lasts as long as its process.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(
    torch.accelerator.is_available(), reason="nothing is wrapped beside an accelerator"
)

_START = """
import sys, types
package = types.ModuleType("deepspeed")
package.__path__ = []
sys.modules["deepspeed"] = package
from shardwise.deepspeed.importer import answer_as
answer_as("deepspeed")
import torch
"""


def run(body: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The finished process of ``body`` after the hand-over of the name ``deepspeed``."""
    return subprocess.run(
        [sys.executable, "-c", _START + body],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


_DEVICE_CONTEXTS = """
with torch.device("meta"):
    made = [torch.tensor([1.0]), torch.empty(2), torch.zeros(2), torch.arange(3), torch.nn.Linear(2, 2).weight]
assert [each.device.type for each in made] == ["meta"] * 5, made
assert torch.zeros(2).device.type == "cpu"
with torch.device("cuda"):
    assert torch.zeros(2).device.type == "cpu" and torch.ones(2, device="cuda:1").device.type == "cpu"
assert torch.cuda.device_count() == 3 and 7 % torch.cuda.device_count() == 1
with torch.random.fork_rng():
    torch.manual_seed(3)
state = torch.cuda.get_rng_state()
first = torch.rand(2)
torch.cuda.set_rng_state(state)
assert torch.equal(torch.rand(2), first)
from deepspeed.accelerator import get_accelerator
assert get_accelerator().device_count() == 3
torch.zeros(2).cuda()
import pickle
assert pickle.loads(pickle.dumps(torch.tensor)) is torch.tensor
"""


def test_device_contexts_reach_the_wrapped_functions_and_one_rank_says_so() -> None:
    """torch caches the functions that a device context applies to: the cache must hold its own."""
    seats = [
        {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
        for rank in range(2)
    ]
    told = [run(_DEVICE_CONTEXTS, MASTER_ADDR="127.0.0.1", MASTER_PORT="1", **seat) for seat in seats]
    assert [each.returncode for each in told] == [0, 0], told
    assert ["torch finds no CUDA" in each.stderr for each in told] == [True, False]


_ROTARY = """
import transformers
sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(sys.argv[0])
read = transformers.LlamaForCausalLM.from_pretrained(sys.argv[0])
found = read.model.rotary_emb.inv_freq
assert torch.allclose(found, torch.tensor([1.0, 0.1, 0.01, 0.001])), found
"""


def test_a_pretrained_llama_has_its_rotary_frequencies(tmp_path: Path) -> None:
    """Transformers makes the model on meta and fills what no file holds; it must see that the model is on meta."""
    pytest.importorskip("transformers")
    done = run(f"sys.argv[0] = {str(tmp_path)!r}\n" + _ROTARY)
    assert done.returncode == 0, done.stderr
