"""Estimates of the bytes of model state per rank at stages 2 and 3, from the formulas of the layout.

    stage 2     weights P, gradients and optimizer state in N parts: with 16-bit compute 2P + (4 + 12) P / N
    stage 3     all in N parts:                                                       (2 + 4 + 12) P / N + a Unit or two

P is the number of parameters and N of data-parallel ranks; masters, moments and accumulated gradients are fp32. If
the optimizer or the parameters are offloaded, their share is host memory. Activations are not included; ``shardwise
train --check`` estimates a whole step.
"""

from torch import nn

_GIB = 1 << 30
_WEIGHT, _GRADIENT, _MASTER_AND_MOMENTS = 2, 4, 12


def _sizes(model: nn.Module) -> tuple[int, int]:
    """Return (number of parameters, number of parameters in the largest layer)."""
    unique = {id(p): p.numel() for p in model.parameters()}
    layers = (sum(p.numel() for p in each.parameters(recurse=False)) for each in model.modules())
    return sum(unique.values()), max(layers, default=0)


def _told(stage: int, total: int, largest: int, gpus: int, nodes: int) -> None:
    ranks = gpus * nodes
    print(
        f"model state at zero stage {stage}: {total / 1e6:.0f}M parameters, the largest layer {largest / 1e6:.0f}M, "
        f"{nodes} hosts with {gpus} devices each\n  host memory | device memory | where"
    )
    for offloads_optimizer in (True, False):
        for offloads_parameters in (True, False) if stage == 3 else (False,):
            if offloads_parameters and not offloads_optimizer:
                continue
            on_host = gpus * total * (_MASTER_AND_MOMENTS / ranks) if offloads_optimizer else 0.0
            on_device = total * _GRADIENT / ranks
            on_device += 0.0 if offloads_optimizer else total * _MASTER_AND_MOMENTS / ranks
            weights = total * _WEIGHT / (ranks if stage == 3 else 1)
            if offloads_parameters:
                on_host += gpus * weights
            else:
                on_device += weights
            if stage == 3:
                on_device += 2 * largest * _WEIGHT
            where = (
                "optimizer and parameters"
                if offloads_parameters
                else "optimizer"
                if offloads_optimizer
                else "none"
            )
            print(f"  {on_host / _GIB:8.2f} GiB | {on_device / _GIB:9.2f} GiB | {where} on the host")


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the memory of model state at stage 3 for an existing model."""
    _told(3, *_sizes(model), num_gpus_per_node, num_nodes)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the memory of model state at stage 3 for a number of parameters and the size of the largest layer."""
    _told(3, total_params, largest_layer_params, num_gpus_per_node, num_nodes)


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the memory of model state at stage 2 for an existing model."""
    _told(2, *_sizes(model), num_gpus_per_node, num_nodes)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the memory of model state at stage 2 for a number of parameters."""
    _told(2, total_params, 0, num_gpus_per_node, num_nodes)
