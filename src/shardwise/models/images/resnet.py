"""ResNet, version 1.5: residual blocks of convolutions with batch norms.

    depth    block                                blocks of the four stages
    18, 34   3 x 3, 3 x 3                         2 2 2 2,  3 4 6 3
    50 ...   1 x 1, 3 x 3, 1 x 1 (4 x as wide)    3 4 6 3,  3 4 23 3 (101),  3 8 36 3 (152)

    y = relu(x + block(x)); if a block halves the side or changes the width, x passes through a 1 x 1 convolution

Version 1.5 halves the side in the 3 x 3 of a wide block, version 1.0 in its first 1 x 1. Convolutions are initialized
by He's rule for outputs, and the last norm of each block with 0, so that every block starts as the identity (Goyal et
al. 2017, arXiv:1706.02677, 5.1).

Paper: He et al. 2015, arXiv:1512.03385.
Cost:  4.1 GFLOP forward for a picture of 224 pixels at depth 50.
Shapes: B batch, S side, W width.
"""

import math

import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.kernels.cross_entropy import cross_entropy
from shardwise.kernels.initializers import Constant, Initializer, Normal
from shardwise.models.images.policy import ResNetPolicy
from shardwise.models.initial import draw_all

_BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
_NARROW = (18, 34)
_WIDER = 4
_CIFAR_SIDE = 64
"""The largest side in pixels of pictures for which the stem keeps the side."""


class ResidualBlock(nn.Module):
    """A residual block: x + norm(conv(...)), where the last norm of ``norms`` starts with 0."""

    def __init__(self, inputs: int, width: int, stride: int, is_narrow: bool) -> None:
        super().__init__()
        outputs = width if is_narrow else _WIDER * width
        if is_narrow:
            shapes = [(inputs, width, 3, stride), (width, width, 3, 1)]
        else:
            shapes = [(inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)]
        self.convolutions = nn.ModuleList(_convolution(*shape) for shape in shapes)
        self.norms = nn.ModuleList(nn.BatchNorm2d(shape[1]) for shape in shapes)
        self.shortcut = (
            nn.Sequential(_convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
            if stride > 1 or inputs != outputs
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output for ``x`` [B, channels, S, S]."""
        kept = x if self.shortcut is None else self.shortcut(x)
        for place, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            x = norm(convolution(F.relu(x) if place else x))
        return F.relu(x + kept)


class ResNet(nn.Module):
    """A ResNet; the initial weights follow from ``seed``, except on the meta device."""

    def __init__(self, policy: ResNetPolicy, classes: int, seed: int = 0) -> None:
        super().__init__()
        self.policy = policy
        is_small = policy.stem == "cifar" or (policy.stem is None and policy.size <= _CIFAR_SIDE)
        is_narrow = policy.depth in _NARROW
        self.stem = _convolution(3, policy.width, 3 if is_small else 7, 1 if is_small else 2)
        self.norm = nn.BatchNorm2d(policy.width)
        self.pool = nn.Identity() if is_small else nn.MaxPool2d(3, 2, 1)
        blocks: list[ResidualBlock] = []
        inputs = policy.width
        for stage, count in enumerate(_BLOCKS[policy.depth]):
            width = policy.width << stage
            for place in range(count):
                blocks.append(ResidualBlock(inputs, width, 2 if stage and not place else 1, is_narrow))
                inputs = width if is_narrow else _WIDER * width
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(inputs, classes)
        if not self.head.weight.is_meta:
            draw_all(self, self.initial_rules(), seed)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the logits of images, or the mean loss if ``labels`` are given.

        Args:
            images: [B, 3, S, S].
            labels: [B].

        Returns:
            Logits [B, classes], or the loss [] in fp32.
        """
        x = self.pool(F.relu(self.norm(self.stem(images))))
        for block in self.blocks:
            x = block(x)
        logits = self.head(x.mean((2, 3)))
        return logits if labels is None else cross_entropy(logits, labels)

    def initial_rules(self) -> dict[str, Initializer]:
        """Return the initial rules: He's rule for convolutions, 0 for the last norm of each block.

        The other norms are 1, biases 0, and the head is normal with standard deviation 0.01.
        """
        last = {f"blocks.{i}.norms.{len(block.norms) - 1}.weight" for i, block in enumerate(self.blocks)}  # type: ignore[arg-type]
        rules: dict[str, Initializer] = {}
        for name, parameter in self.named_parameters():
            if parameter.dim() == 4:
                rules[name] = Normal(math.sqrt(2 / (parameter.shape[0] * parameter[0, 0].numel())))
            elif parameter.dim() == 2:
                rules[name] = Normal(0.01)
            else:
                rules[name] = Constant(1.0 if name.endswith("weight") and name not in last else 0.0)
        return rules

    def unit_patterns(self) -> list[str]:
        """Return patterns of the modules whose parameters move together: the blocks (stem and head: the root)."""
        return ["blocks.*"]


def _convolution(inputs: int, outputs: int, kernel: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
