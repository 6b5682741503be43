"""Train PyTorch models that are larger than the memory of one device.

    engine = shardwise.initialize(model, config="run.yaml")
    for batch in loader:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()

Names are imported on first use. ``import shardwise`` is therefore quick, prints nothing and touches no device.
"""

import importlib
from typing import TYPE_CHECKING, Any

import shardwise.comm.rendezvous.environment as _environment  # noqa: F401 - NCCL reads what it sets

if (
    TYPE_CHECKING
):  # for editors and type checkers; at run time __getattr__ imports a name when it is first used
    from shardwise.base.errors import ShardwiseError as ShardwiseError
    from shardwise.base.ragged import Ragged as Ragged
    from shardwise.config.run import RunConfig as RunConfig
    from shardwise.engine.construction.build import initialize as initialize
    from shardwise.engine.construction.sharded_init import sharded_init as sharded_init
    from shardwise.engine.engine import Engine as Engine
    from shardwise.engine.fit.fits import fits as fits
    from shardwise.engine.fit.fits import longest as longest
    from shardwise.engine.fit.foresee import foresee as foresee
    from shardwise.engine.fit.removals import removals as removals
    from shardwise.engine.fit.search import search as search
    from shardwise.engine.fit.solve import solve as solve
    from shardwise.engine.step.end import StepResult as StepResult
    from shardwise.launch.function import launch as launch
    from shardwise.models.vectors import Vectors as Vectors
    from shardwise.parallel.embedding.collection import EmbeddingCollection as EmbeddingCollection
    from shardwise.parallel.embedding.policy import DynamicPolicy as DynamicPolicy
    from shardwise.parallel.embedding.policy import RowOptimizerPolicy as RowOptimizerPolicy
    from shardwise.parallel.embedding.policy import TablePolicy as TablePolicy
    from shardwise.parallel.expert.module import MixtureOfExperts as MixtureOfExperts
    from shardwise.parallel.expert.policy import RouterPolicy as RouterPolicy
    from shardwise.parallel.pipeline.layers import Layers as Layers
    from shardwise.parallel.pipeline.layers import LayerSpec as LayerSpec
    from shardwise.parallel.pipeline.layers import TiedSpec as TiedSpec
    from shardwise.serving.scorer import Scorer as Scorer
    from shardwise.verify.run import verify as verify

__version__ = "0.1.0"

_HOME = {
    "DynamicPolicy": "shardwise.parallel.embedding.policy",
    "EmbeddingCollection": "shardwise.parallel.embedding.collection",
    "Engine": "shardwise.engine.engine",
    "LayerSpec": "shardwise.parallel.pipeline.layers",
    "Layers": "shardwise.parallel.pipeline.layers",
    "MixtureOfExperts": "shardwise.parallel.expert.module",
    "Ragged": "shardwise.base.ragged",
    "RouterPolicy": "shardwise.parallel.expert.policy",
    "RowOptimizerPolicy": "shardwise.parallel.embedding.policy",
    "RunConfig": "shardwise.config.run",
    "Scorer": "shardwise.serving.scorer",
    "ShardwiseError": "shardwise.base.errors",
    "StepResult": "shardwise.engine.step.end",
    "TablePolicy": "shardwise.parallel.embedding.policy",
    "TiedSpec": "shardwise.parallel.pipeline.layers",
    "Vectors": "shardwise.models.vectors",
    "fits": "shardwise.engine.fit.fits",
    "foresee": "shardwise.engine.fit.foresee",
    "initialize": "shardwise.engine.construction.build",
    "longest": "shardwise.engine.fit.fits",
    "removals": "shardwise.engine.fit.removals",
    "search": "shardwise.engine.fit.search",
    "sharded_init": "shardwise.engine.construction.sharded_init",
    "solve": "shardwise.engine.fit.solve",
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
    "Scorer",
    "ShardwiseError",
    "StepResult",
    "TablePolicy",
    "TiedSpec",
    "Vectors",
    "fits",
    "foresee",
    "initialize",
    "launch",
    "longest",
    "removals",
    "search",
    "sharded_init",
    "solve",
    "verify",
]


if not TYPE_CHECKING:  # a type checker that saw __getattr__ would accept any name

    def __getattr__(name: str) -> Any:
        if name in ("launch", "verify"):  # the subpackage itself is callable
            return importlib.import_module(f"shardwise.{name}")
        if name in _HOME:
            return getattr(importlib.import_module(_HOME[name]), name)
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
