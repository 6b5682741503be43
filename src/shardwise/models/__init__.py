"""Models that come with the package, and the initialization, import and export of weights.

build(policy)          makes the model of a configuration, on a real device or under ``torch.device("meta")``
build_ctr(policy, ...) does the same for a click-through model, which needs the columns of its data
build_image_model(...) does the same for a model of images, which needs the number of classes
open_weights(path)     opens weights to start from, read in slices
write_huggingface(...) writes a folder that transformers opens
generate(...)          generates text with a trained model
"""

from torch import nn

from shardwise.base.errors import ConfigError
from shardwise.base.target import call_target
from shardwise.models.bert import Bert, BertPolicy
from shardwise.models.ctr.build import build_ctr
from shardwise.models.ctr.model import ClickModel
from shardwise.models.ctr.policy import CtrPolicy
from shardwise.models.export import write_huggingface
from shardwise.models.gpt import Gpt, GptPolicy, flops_per_token
from shardwise.models.images import build_image_model
from shardwise.models.policy import ModelPolicy, TargetPolicy
from shardwise.models.source import WeightSource, gpt_policy_from_huggingface, open_weights

__all__ = [
    "Bert",
    "BertPolicy",
    "ClickModel",
    "CtrPolicy",
    "Gpt",
    "GptPolicy",
    "ModelPolicy",
    "TargetPolicy",
    "WeightSource",
    "build",
    "build_ctr",
    "build_image_model",
    "flops_per_token",
    "gpt_policy_from_huggingface",
    "open_weights",
    "write_huggingface",
]


def build(
    policy: GptPolicy | BertPolicy | TargetPolicy, vocab: int | None = None, seed: int = 0
) -> nn.Module:
    """Build the model that ``policy`` describes.

    Args:
        policy: The keys under ``model:``.
        vocab: The size of the tokenizer's vocabulary; None: there is no tokenizer.
        seed: The seed of the initial weights of a built-in model.

    Raises:
        ConfigError: if the policy and the vocabulary contradict one another, or a target returns something else than
            a module.
    """
    if isinstance(policy, GptPolicy):
        return Gpt(policy.resolved(vocab), seed=seed)
    if isinstance(policy, BertPolicy):
        return Bert(policy if vocab is None else policy.resolved(vocab), seed=seed)
    model = call_target("model.target", policy.target, policy.keywords())
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model.target {policy.target!r} returned a {type(model).__name__}; expected an nn.Module"
        )
    return model
