"""A batch becomes a call of the model, and its result a loss."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.base.errors import UsageError
from shardwise.base.ragged import Ragged
from shardwise.engine.parts.inputs import apply, call_model, cast_at_the_root, cast_inputs, find_loss
from shardwise.parallel.pipeline.layers import Layers
from shardwise.precision.policy import PrecisionPolicy

CPU = torch.device("cpu")


class Noted(nn.Module):
    """Returns what it was called with."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs


def test_forms_of_a_batch() -> None:
    model = Noted()
    assert apply(model, {"a": 1}) == ((), {"a": 1})
    assert apply(model, (1, 2)) == apply(model, [1, 2]) == ((1, 2), {})
    assert apply(model, 3) == ((3,), {})


def test_a_loss_of_the_users_gets_model_and_batch() -> None:
    model = Noted()
    assert call_model(model, lambda model, batch: model(batch["a"]), {"a": 1}, CPU) == ((1,), {})
    assert call_model(model, None, {"a": 1}, CPU) == ((), {"a": 1})


def test_floating_tensors_are_cast_and_others_are_not() -> None:
    keys = Ragged(torch.tensor([1]), torch.tensor([0, 1]))
    weighted = keys._replace(weights=torch.ones(1))
    given = {"x": [torch.ones(1), torch.tensor([1]), "text"], "keys": {"plain": keys, "weighted": weighted}}
    found = cast_inputs(given, CPU, torch.bfloat16)
    assert [getattr(each, "dtype", each) for each in found["x"]] == [torch.bfloat16, torch.int64, "text"]
    assert found["keys"]["plain"] is keys and found["keys"]["weighted"].weights.dtype == torch.bfloat16
    assert cast_inputs(given, CPU, None)["x"][0].dtype == torch.float32


class Sums(nn.Module):
    """Notes the dtypes that it is given."""

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        self.seen = [None if each is None else each.dtype for each in (x, targets)]
        return x.sum()


class SumsOfLayers(Layers):
    """A list of layers that notes the dtypes that it is given."""

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        self.seen = [None if each is None else each.dtype for each in (x, targets)]
        return x.sum()


def test_inputs_and_outputs_of_the_root() -> None:
    precision, x = PrecisionPolicy(compute="bf16"), torch.ones(2)
    model = Sums()
    handles = cast_at_the_root(model, precision, CPU, casts_output=True)
    assert model(x, targets=x).dtype == torch.float32 and model.seen == [torch.bfloat16, torch.bfloat16]
    for handle in handles:
        handle.remove()
    cast_at_the_root(model, precision, CPU, casts_output=False)
    assert model(x, x).dtype == torch.bfloat16 and model.seen == [torch.bfloat16, torch.bfloat16]
    model = Sums()
    assert len(cast_at_the_root(model, PrecisionPolicy(), CPU, casts_output=True)) == 1


def test_targets_of_a_list_of_layers_keep_their_dtype() -> None:
    model = SumsOfLayers([nn.Linear(2, 2)], loss=lambda x, targets: x.sum())
    cast_at_the_root(model, PrecisionPolicy(compute="bf16"), CPU, casts_output=False)
    x = torch.ones(2)
    for call in (lambda: model(x, x), lambda: model(x, targets=x)):
        call()
        assert model.seen == [torch.bfloat16, torch.float32]


def test_the_loss_is_the_output_its_entry_its_attribute_or_the_first() -> None:
    loss, other = torch.tensor(3.0), torch.zeros(2)
    for output in (loss, {"logits": other, "loss": loss}, SimpleNamespace(loss=loss), (loss, other)):
        assert find_loss(output) is loss
    for output, said in (
        (other, r"a tensor of shape \(2,\)"),
        ({"a": loss}, r"a mapping with keys \['a'\]"),
        (3, "a int"),
        ((other, loss), "a tuple"),
    ):
        with pytest.raises(UsageError, match=f"the model returned {said}"):
            find_loss(output)
