"""LAMB, LARS and Muon by their formulas, on whole tensors of one process: what the shards are held to.

Each takes the mean gradient of a step, which is clipped already, and knows nothing of the package.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn, optim

Rule = Callable[[str, Tensor, Tensor, dict[str, Any]], None]
"""(name, weights, gradient, state of the parameter): one step, in place."""


def lamb(of: Callable[[str], Mapping[str, Any]]) -> Rule:
    """``of``: the numbers of a parameter by its name."""

    def step(name: str, weights: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
        p = {
            "eps": 1e-6,
            "weight_decay": 0.0,
            "betas": (0.9, 0.999),
            "trust": True,
            "correct": "moments",
        } | of(name)
        b1, b2 = p["betas"]
        t = state["t"] = state.get("t", 0) + 1
        state["m"] = b1 * state.get("m", 0.0) + (1 - b1) * gradient
        state["v"] = b2 * state.get("v", 0.0) + (1 - b2) * gradient**2
        if p["correct"] == "moments":
            r = (state["m"] / (1 - b1**t)) / ((state["v"] / (1 - b2**t)).sqrt() + p["eps"])
            lr = p["lr"]
        else:
            r = state["m"] / (state["v"].sqrt() + p["eps"])
            lr = p["lr"] * math.sqrt(1 - b2**t) / (1 - b1**t)
        u = r + p["weight_decay"] * weights
        ratio = 1.0
        if p["trust"] and weights.norm() > 0 and u.norm() > 0:
            ratio = float((weights.norm() / u.norm()).clamp(*p.get("trust_bounds", (0.01, 10.0))))
        weights -= lr * ratio * u

    return step


def lars(of: Callable[[str], Mapping[str, Any]]) -> Rule:
    def step(name: str, weights: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
        p = {"weight_decay": 0.0, "momentum": 0.9, "trust": True, "trust_coefficient": 1e-3} | of(name)
        decay, ratio = p["weight_decay"], 1.0
        if p["trust"] and weights.norm() > 0 and gradient.norm() > 0:
            below = float(gradient.norm() + decay * weights.norm())
            ratio = p["trust_coefficient"] * float(weights.norm()) / below
        state["v"] = p["momentum"] * state.get("v", 0.0) + p["lr"] * ratio * (gradient + decay * weights)
        weights -= state["v"]

    return step


def lion(of: Callable[[str], Mapping[str, Any]]) -> Rule:
    def step(name: str, weights: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
        p = {"weight_decay": 0.0, "betas": (0.9, 0.99)} | of(name)
        b1, b2 = p["betas"]
        before = state.get("m", torch.zeros_like(weights))
        weights -= p["lr"] * (torch.sign(b1 * before + (1 - b1) * gradient) + p["weight_decay"] * weights)
        state["m"] = b2 * before + (1 - b2) * gradient

    return step


def muon(of: Callable[[str], Mapping[str, Any]], is_matrix: Callable[[str], bool]) -> Rule:
    """AdamW for what is no matrix."""

    def step(name: str, weights: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
        p = {"weight_decay": 0.0, "momentum": 0.95, "betas": (0.9, 0.999), "eps": 1e-8} | of(name)
        if not is_matrix(name):
            b1, b2 = p["betas"]
            t = state["t"] = state.get("t", 0) + 1
            state["m"] = b1 * state.get("m", 0.0) + (1 - b1) * gradient
            state["v"] = b2 * state.get("v", 0.0) + (1 - b2) * gradient**2
            lr = p.get("rest_lr", p["lr"])
            weights *= 1 - lr * p["weight_decay"]
            weights -= lr * (state["m"] / (1 - b1**t)) / ((state["v"] / (1 - b2**t)).sqrt() + p["eps"])
            return
        if (
            "ns_dtype" not in p
        ):  # in bf16 the last digits depend on the order of a product's sums: torch's own
            own = state.setdefault("own", nn.Parameter(weights.clone()))
            numbers = {"lr": p["lr"], "weight_decay": p["weight_decay"], "adjust_lr_fn": "match_rms_adamw"}
            optimizer = state.setdefault("optimizer", optim.Muon([own], **numbers))
            own.grad = gradient.clone()
            optimizer.step()
            weights.copy_(own)
            return
        mu = p["momentum"]
        state["b"] = mu * state.get("b", 0.0) + (1 - mu) * gradient
        d = (1 - mu) * gradient + mu * state["b"]
        x = d / d.norm()
        for _ in range(5):
            s = x @ x.T
            x = 3.4445 * x + (-4.7750 * s + 2.0315 * s @ s) @ x
        weights *= 1 - p["lr"] * p["weight_decay"]
        weights -= p["lr"] * 0.2 * math.sqrt(max(weights.shape)) * x

    return step


def train(
    model: nn.Module,
    rule: Rule,
    steps: Iterable[list[tuple[Any, float]]],
    loss_of: Callable[[nn.Module, Any], Tensor],
    clip: float,
) -> list[dict[str, Tensor]]:
    """Weights after each step; a step is (batch, weight) pairs, gradients are Σ w ∇loss / Σ w."""
    states: dict[str, dict[str, Any]] = {name: {} for name, _ in model.named_parameters()}
    found = []
    for batches in steps:
        model.zero_grad()
        total = sum(weight for _, weight in batches)
        for batch, weight in batches:
            (loss_of(model, batch) * (weight / total)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    rule(name, parameter, parameter.grad, states[name])
        found.append({name: each.detach().clone() for name, each in model.named_parameters()})
    return found
