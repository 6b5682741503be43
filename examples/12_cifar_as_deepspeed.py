"""Lesson 12: a script of DeepSpeed's as it is: small pictures, dense or with experts. It knows nothing of Shardwise.

Run:  shardwise launch --as-deepspeed --ranks 2 examples/12_cifar_as_deepspeed.py
      ... --moe --num-experts 4 --ep-world-size 2
      ... --moe --num-experts 2 4 --ep-world-size 2 --mlp-type residual --noisy-gate-policy RSample --moe-param-group

The flags are those of DeepSpeed's tutorial on CIFAR-10. Layers of experts take the place of a linear layer; with
``--ep-world-size 2`` a rank holds half of each one's experts, and with ``residual`` a dense layer runs beside them.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import deepspeed

CLASSES, SIDE, BATCH = 10, 16, 32


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--stage", type=int, default=0, help="of ZeRO")
    parser.add_argument("--moe", action="store_true", help="layers of experts")
    parser.add_argument(
        "--ep-world-size", type=int, default=1, help="ranks that share the experts of a layer"
    )
    parser.add_argument("--num-experts", type=int, nargs="+", default=[2], help="of each layer in turn")
    parser.add_argument("--mlp-type", choices=["standard", "residual"], default="standard")
    parser.add_argument("--top-k", type=int, default=1)
    parser.add_argument("--min-capacity", type=int, default=0)
    parser.add_argument("--noisy-gate-policy", choices=["None", "RSample", "Jitter"])
    parser.add_argument("--moe-param-group", action="store_true", help="experts in groups of the optimizer")
    parser.add_argument("--l-aux", type=float, default=0.01, help="weight of the balance in the loss")
    return deepspeed.add_config_arguments(parser).parse_args()


class Net(nn.Module):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(3, 8, 5, stride=2, padding=2), nn.ReLU()),
            *(
                nn.Conv2d(8, 16, 5, stride=2, padding=2),
                nn.ReLU(),
                nn.Flatten(),
                nn.Linear(16 * 16, 84),
                nn.ReLU(),
            ),
        )
        dense = nn.Linear(84, 84)
        self.middle = dense if not args.moe else None
        self.layers = nn.ModuleList(
            deepspeed.moe.layer.MoE(
                hidden_size=84,
                expert=dense,
                num_experts=count,
                ep_size=args.ep_world_size,
                use_residual=args.mlp_type == "residual",
                k=args.top_k,
                min_capacity=args.min_capacity,
                noisy_gate_policy=args.noisy_gate_policy,
            )
            for count in (args.num_experts if args.moe else ())
        )
        self.last = nn.Linear(84, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.features(x)
        l_aux = x.new_zeros(())
        if self.middle is not None:
            x = self.middle(x)
        for layer in self.layers:
            x, more, _ = layer(x)
            l_aux = l_aux + more
        return self.last(x.relu()), l_aux


def pictures(count: int, seed: int) -> TensorDataset:
    """Noise on a pattern of each class."""
    patterns = torch.randn(CLASSES, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
    draws = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=draws)
    return TensorDataset(patterns[labels] + 2.5 * torch.randn(count, 3, SIDE, SIDE, generator=draws), labels)


def main() -> None:
    args = arguments()
    deepspeed.init_distributed()
    torch.manual_seed(0)
    net = Net(args)
    parameters = [p for p in net.parameters() if p.requires_grad]
    if args.moe_param_group:
        split = deepspeed.moe.utils.split_params_into_different_moe_groups_for_optimizer
        parameters = split({"params": parameters, "name": "parameters"})
    config = {
        "train_batch_size": BATCH,
        "steps_per_print": 1000,
        "optimizer": {"type": "Adam", "params": {"lr": 2e-3}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-3, "warmup_num_steps": 20}},
        "zero_optimization": {"stage": args.stage},
    }
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=net, model_parameters=parameters, training_data=pictures(1024, seed=2), config=config
    )
    batches = iter(deepspeed.utils.RepeatingLoader(loader))
    for step in range(1, args.steps + 1):
        images, labels = next(batches)
        logits, l_aux = engine(images.to(engine.device))
        loss = nn.functional.cross_entropy(logits, labels.to(engine.device))
        engine.backward(loss + args.l_aux * l_aux)
        engine.step()
        if step <= 2 or step % 20 == 0:
            seen = loss.detach() / engine.world_size
            deepspeed.comm.all_reduce(seen)
            if engine.global_rank == 0:
                print(f"step {step:4}  loss {seen.item():.6f}")

    engine.eval()
    images, labels = pictures(500, seed=3).tensors
    with torch.no_grad():
        found = engine(images.to(engine.device))[0].argmax(-1).cpu()
    if engine.global_rank == 0:
        print(f"right: {(found == labels).float().mean().item():.3f} of pictures held out")


if __name__ == "__main__":
    main()
