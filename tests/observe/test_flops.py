import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shardwise.models.gpt import Gpt, GptPolicy, flops_per_token
from shardwise.observe import flops


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989.4e12),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756e12),
        ("NVIDIA H200", torch.float16, 989.4e12),
        ("NVIDIA B200", torch.bfloat16, 2250e12),
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312e12),
        ("NVIDIA A100-PCIE-40GB", torch.float32, 19.5e12),
        ("NVIDIA A100 80GB PCIe", torch.bfloat16, 312e12),
        ("Tesla V100-SXM2-16GB", torch.float16, 125e12),
        ("Tesla T4", torch.float16, 65e12),
        ("NVIDIA L4", torch.bfloat16, 121e12),
        ("NVIDIA L40S", torch.bfloat16, 362.05e12),
        ("NVIDIA GeForce RTX 4090", torch.bfloat16, 165.2e12),
        ("NVIDIA GeForce RTX 3090", torch.float16, 71e12),
    ],
)
def test_peaks_by_the_names_that_drivers_give(name: str, dtype: torch.dtype, expected: float) -> None:
    assert flops.peak(name, dtype) == expected


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA L400",
        "Intel(R) Xeon(R)",
        "",
    ],
)
def test_no_peak_is_invented_for_a_device_that_shares_a_name_in_part(name: str) -> None:
    assert flops.peak(name, torch.bfloat16) is None


def test_a_type_without_matrix_units_has_no_peak() -> None:
    assert flops.peak("Tesla V100-SXM2-32GB", torch.bfloat16) is None
    assert flops.peak("NVIDIA H200", torch.float64) is None


def test_no_peak_for_a_processor() -> None:
    assert flops.peak_of(torch.device("cpu"), torch.float32) is None
    assert flops.mfu(1e12, 1.0, None) is None


def test_mfu_is_the_share_of_all_devices() -> None:
    assert flops.mfu(flops=4e14, step_s=2.0, peaks=2 * 312e12) == pytest.approx(4e14 / 1248e12)


def test_one_petaflop_for_a_day() -> None:
    assert flops.pf_days(8.64e19) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("batch", "sequence", "width", "layers", "vocabulary"), [(2, 2048, 1536, 16, 51200), (1, 64, 32, 2, 256)]
)
def test_the_closed_form_for_a_transformer(
    batch: int, sequence: int, width: int, layers: int, vocabulary: int
) -> None:
    """Narayanan et al. 2021, arXiv:2104.04473, without recomputation: 72 B T L D^2 (1 + T / 6D + V / 12LD)."""
    matmul_parameters = 12 * layers * width**2 + vocabulary * width
    ours = flops.needed_per_token(matmul_parameters, layers, sequence, width) * batch * sequence
    factor = 1 + sequence / (6 * width) + vocabulary / (12 * layers * width)
    assert ours == pytest.approx(72 * batch * sequence * layers * width**2 * factor, rel=1e-12)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_counting_a_step_gives_the_formula(family: str) -> None:
    policy = GptPolicy(family=family, layers=2, width=32, heads=4, context=16, vocab=50)
    model = Gpt(policy)
    x = torch.randint(50, (3, 16))
    with flops.FlopsCounter() as counter:
        F.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
    assert counter.flops == x.numel() * flops_per_token(policy, causal=False)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_runs_again_is_not_counted_twice(reentrant: bool) -> None:
    """Seen by eye: without the rule in ``is_repeated`` the second figure is a third larger."""
    block, found = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), []
    for again in (False, True):
        x = torch.randn(5, 8, requires_grad=True)
        with flops.FlopsCounter() as counter:
            out = checkpoint(block, x, use_reentrant=reentrant) if again else block(x)
            out.sum().backward()
        found.append(counter.flops)
    assert found == [6 * 5 * 2 * 64] * 2


def test_convolutions_count() -> None:
    with flops.FlopsCounter() as counter, torch.no_grad():
        nn.Conv2d(3, 4, 3, padding=1)(torch.randn(2, 3, 8, 8))
    assert counter.flops == 2 * (2 * 8 * 8) * 4 * 3 * 9


def test_the_peak_of_a_processor_is_measured() -> None:
    assert flops.measured_peak(torch.float32) > 0
    assert flops.flops_text(45.2e9) == "45.2 GFLOP" and flops.flops_text(3e6) == "3 MFLOP"
