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
    "DynamicPolicy": "shardwise.parallel.embedding.policy",
    "EmbeddingCollection": "shardwise.parallel.embedding.collection",
    "Engine": "shardwise.engine.engine",
    "LayerSpec": "shardwise.parallel.pipeline.layers",
    "Layers": "shardwise.parallel.pipeline.layers",
    "MixtureOfExperts": "shardwise.parallel.expert.module",
    "Ragged": "shardwise.plan.ragged",
    "RouterPolicy": "shardwise.parallel.expert.policy",
    "RowOptimizerPolicy": "shardwise.parallel.embedding.policy",
    "RunConfig": "shardwise.config.run",
    "ShardwiseError": "shardwise.plan.errors",
    "TablePolicy": "shardwise.parallel.embedding.policy",
    "TiedSpec": "shardwise.parallel.pipeline.layers",
    "Vectors": "shardwise.models.vectors",
    "fits": "shardwise.engine.fits",
    "foresee": "shardwise.engine.foresee",
    "initialize": "shardwise.engine.build",
    "longest": "shardwise.engine.fits",
    "sharded_init": "shardwise.engine.sharded_init",
}
__all__ = [
    "DynamicPolicy",
    "EmbeddingCollection",
    "Engine",
    "LayerSpec",
    "Layers",
    "MixtureOfExperts",
    "Ragged",
    "RouterPolicy",
    "RowOptimizerPolicy",
    "RunConfig",
    "ShardwiseError",
    "TablePolicy",
    "TiedSpec",
    "Vectors",
    "fits",
    "foresee",
    "initialize",
    "launch",
    "longest",
    "sharded_init",
]


def __getattr__(name: str) -> Any:
    if name == "launch":  # a package that can be called
        return importlib.import_module("shardwise.launch")
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'shardwise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
