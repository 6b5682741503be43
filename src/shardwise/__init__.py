"""Shardwise trains PyTorch models that are larger than the hardware at hand.

    engine = shardwise.initialize(model, config="run.yaml")
    for batch in loader:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()

Names are loaded on first use, so that the import is quick, prints nothing and touches no device.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "initialize": "shardwise.engine.build",
    "Engine": "shardwise.engine.engine",
    "LayerSpec": "shardwise.parallel.pipeline.layers",
    "Layers": "shardwise.parallel.pipeline.layers",
    "RunConfig": "shardwise.config.run",
    "ShardwiseError": "shardwise.plan.errors",
    "TiedSpec": "shardwise.parallel.pipeline.layers",
}
__all__ = ["Engine", "LayerSpec", "Layers", "RunConfig", "ShardwiseError", "TiedSpec", "initialize"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'shardwise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
