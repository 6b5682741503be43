"""Lesson 11: a pipeline in DeepSpeed's names that trains, saves, loads and compares. One import is another.

Run:  shardwise launch --ranks 2 examples/11_pipeline_as_deepspeed.py

The layers of a small AlexNet are dealt to two stages; more ranks make more pipelines side by side. ``train_batch``
takes as many microbatches from the data as a step has, ``eval_batch`` gives the last stage the logits too. The second
engine begins with other weights, loads the first one's, and has to lose the same.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shardwise.deepspeed as deepspeed

CLASSES, MICRO = 10, 8


class SmallAlexNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.ReLU(inplace=True)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(inplace=True)),
        )
        self.avgpool = nn.AdaptiveAvgPool2d(2)
        self.classifier = nn.Sequential(nn.Linear(32 * 4, 64), nn.ReLU(inplace=True), nn.Linear(64, CLASSES))


def engine_of(seed: int, data: TensorDataset):
    torch.manual_seed(seed)
    net = SmallAlexNet()
    pipeline = deepspeed.pipe.PipelineModule(
        layers=[*net.features, net.avgpool, lambda x: torch.flatten(x, 1), *net.classifier],
        loss_fn=nn.CrossEntropyLoss(),
        num_stages=min(2, deepspeed.comm.get_world_size()),
        partition_method="parameters",
        activation_checkpoint_interval=0,
    )
    config = {
        "train_batch_size": 4 * MICRO,
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_clipping": 0.3,
        "zero_optimization": {"stage": 1},
        "steps_per_print": 1000,
        "optimizer": {"type": "Adam", "params": {"lr": 3e-3, "torch_adam": True}},
    }
    parameters = [p for p in pipeline.parameters() if p.requires_grad]
    return deepspeed.initialize(
        model=pipeline, model_parameters=parameters, training_data=data, config=config
    )[0]


def pictures(count: int) -> TensorDataset:
    """Noise on a pattern of each class."""
    draws = torch.Generator().manual_seed(1)
    patterns = torch.randn(CLASSES, 3, 16, 16, generator=draws)
    labels = torch.randint(CLASSES, (count,), generator=draws)
    return TensorDataset(patterns[labels] + 0.5 * torch.randn(count, 3, 16, 16, generator=draws), labels)


def evaluated(engine, data: TensorDataset) -> tuple[Tensor, Tensor | None]:
    loader = deepspeed.utils.RepeatingLoader(DataLoader(data, batch_size=MICRO))
    with torch.no_grad():
        return engine.eval_batch(iter(loader), return_logits=True, compute_loss=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", default="pipeline_checkpoints")
    args = parser.parse_args()

    deepspeed.init_distributed()
    data = pictures(256)
    engine = engine_of(1, data)
    for step in range(args.steps):
        loss = engine.train_batch()
        if engine.global_rank == 0:
            print(f"step {step + 1:4}  loss {loss.item():.6f}")
    loss, logits = evaluated(engine, data)
    engine.save_checkpoint(args.folder, tag="trained")

    other = engine_of(2, data)
    began, _ = evaluated(other, data)
    other.load_checkpoint(
        args.folder, tag="trained", load_optimizer_states=False, load_lr_scheduler_states=False
    )
    loaded, logits_loaded = evaluated(other, data)
    if engine.global_rank == 0:
        print(
            f"evaluated: trained {loss.item():.6f}, other weights {began.item():.6f}, loaded {loaded.item():.6f}"
        )
    if logits is not None and logits_loaded is not None:  # on the last stage
        print(f"logits {logits.sum().item():.5f}, of what was loaded {logits_loaded.sum().item():.5f}")


if __name__ == "__main__":
    main()
