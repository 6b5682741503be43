"""Layers of experts of transformers."""

import importlib
import importlib.util
from typing import Any

import pytest
import torch

from tests.foreign.wide import wide

E, F, D, N, K = 4, 6, 5, 9, 2


OFTEN = [
    ("mixtral", "MixtralExperts"),
    ("gpt_oss", "GptOssExperts"),
    ("aria", "AriaExperts"),
    ("nemotron_h", "NemotronHExperts"),
    ("step3p7", "Step3p7Experts"),
    ("openai_privacy_filter", "OpenAIPrivacyFilterExperts"),
]
"""One class of transformers per form; the others in the soak."""


class Config:
    """Whatever size a class asks for."""

    hidden_act = hidden_activation = mlp_hidden_act = dense_act_fn = "silu"
    hidden_size = moe_hidden_size = D
    moe_latent_size = None
    swiglu_alpha, swiglu_limit = 1.5, 0.5
    mlp_gate_softcap = mlp_up_softcap = 2.0
    zero_expert_num = 1
    ffn_act_fn = {"name": "silu"}
    post_norm_eps = 1e-6
    dropout_rate = 0.0
    _experts_implementation = "eager"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return E if "expert" in name and "ffn" not in name else F


def theirs(folder: str, name: str) -> Any:
    transformers = pytest.importorskip("transformers")
    if tuple(map(int, transformers.__version__.split(".")[:1])) < (5,):
        pytest.skip("stacked experts came with transformers 5")
    of_class = getattr(importlib.import_module(f"transformers.models.{folder}.modeling_{folder}"), name)
    with wide():
        module = of_class(Config())
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module
