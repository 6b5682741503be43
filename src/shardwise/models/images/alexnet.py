"""AlexNet in its version with one tower, as a list of layers that a pipeline cuts anywhere.

    11 x 11 / 4, pool   5 x 5, pool   3 x 3   3 x 3   3 x 3, pool   -> 6 x 6 x 4W -> hidden -> hidden -> classes

Each pool is 3 x 3 with stride 2, and a ReLU follows every layer but the last. Initial weights follow He's rule
(arXiv:1502.01852): with torch's own rule the signal fades in eight layers without norms.

Paper: Krizhevsky 2014, "One weird trick for parallelizing convolutional neural networks", arXiv:1404.5997.
Shapes: W width, B batch, S side.
"""

from torch import nn

from shardwise.kernels.cross_entropy import cross_entropy
from shardwise.models.images.policy import AlexNetPolicy
from shardwise.parallel.pipeline.layers import Layers, LayerSpec

_LAST_SIDE = 6


def alexnet(policy: AlexNetPolicy, classes: int, seed: int = 0) -> Layers:
    """Build an AlexNet.

    ``model(images [B, 3, S, S], labels [B])`` returns the mean loss, and ``model(images)`` returns logits [B,
    classes].

    Args:
        policy: The keys under ``model:``.
        classes: The number of outputs.
        seed: The seed of the initial weights.
    """
    w, hidden = policy.width, policy.hidden
    return Layers(
        [
            LayerSpec(_convolution, 3, w, 11, stride=4, padding=2, pools=True),
            LayerSpec(_convolution, w, 3 * w, 5, padding=2, pools=True),
            LayerSpec(_convolution, 3 * w, 6 * w, 3, padding=1),
            LayerSpec(_convolution, 6 * w, 4 * w, 3, padding=1),
            LayerSpec(_convolution, 4 * w, 4 * w, 3, padding=1, pools=True),
            nn.Sequential(nn.AdaptiveAvgPool2d(_LAST_SIDE), nn.Flatten()),
            LayerSpec(_matrix, 4 * w * _LAST_SIDE**2, hidden, policy.dropout),
            LayerSpec(_matrix, hidden, hidden, policy.dropout),
            LayerSpec(nn.Linear, hidden, classes),
        ],
        loss=cross_entropy,
        seed=seed,
    )


def _convolution(
    inputs: int, outputs: int, kernel: int, *, stride: int = 1, padding: int, pools: bool = False
) -> nn.Sequential:
    made = nn.Conv2d(inputs, outputs, kernel, stride, padding)
    pool = [nn.MaxPool2d(3, 2)] if pools else []
    return nn.Sequential(_started(made), nn.ReLU(), *pool)


def _matrix(inputs: int, outputs: int, dropout: float) -> nn.Sequential:
    return nn.Sequential(nn.Dropout(dropout), _started(nn.Linear(inputs, outputs)), nn.ReLU())


def _started(module: nn.Conv2d | nn.Linear) -> nn.Module:
    nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    assert module.bias is not None, "made with one"
    nn.init.zeros_(module.bias)
    return module
