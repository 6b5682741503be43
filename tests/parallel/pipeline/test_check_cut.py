"""A cut model is compared with the whole one, and what differs is named."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.base.errors import PlanError
from shardwise.models.gpt import Gpt, GptPolicy
from shardwise.parallel.pipeline.check_cut import check_cut
from shardwise.parallel.pipeline.cut import cut
from tests.engine.nets import Language, seeded
from tests.parallel.pipeline.chain import error_of_cut
from tests.parallel.pipeline.cuttable import TOKENS, Images, Patches, loss, on_images


class Skipping(Language):
    """The embedding reaches every block beside the block's input: more than one output passes."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        first = x = self.embed(tokens)
        for block in self.blocks:
            x = block(x + first)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class Backwards(Language):
    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in reversed(self.blocks):
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class LateScale(Patches):
    """A parameter that starts as zero is registered first and used last."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) + self.first.sum()


def test_a_block_that_stands_twice_in_a_stage_ends_it_the_second_time() -> None:
    model = seeded(Language, 2)
    one, other = model.blocks
    model.blocks = nn.ModuleList([one, one, other, other])
    check_cut(model, loss, ("blocks.2",))
    assert error_of_cut(model, loss, ("blocks.2",)) <= 1e-12


@pytest.mark.parametrize(
    ("make", "call", "starts", "stage"),
    [
        (lambda: seeded(Skipping), loss, ("blocks.1",), "stage 1 of 2"),
        (lambda: seeded(Skipping), loss, ("blocks.1", "blocks.2"), "stage 1 of 3"),
        (lambda: seeded(LateScale), on_images((2, 3, 4, 4)), ("layers.1", "layers.2"), "stage 2 of 3"),
    ],
    ids=["a second value passes", "of three stages", "a parameter that is zero"],
)
def test_a_model_that_cannot_be_cut_names_the_first_stage(
    make: Any, call: Any, starts: Any, stage: str
) -> None:
    model = make()
    with pytest.raises(PlanError, match=f"{stage}.*list of layers"):
        check_cut(model, call, starts)
    assert model.training


def test_blocks_that_run_in_another_order_are_found() -> None:
    with pytest.raises(PlanError, match="order"):
        check_cut(seeded(Backwards), loss, ("blocks.1",))


def test_dropout_and_batch_norm_stay_as_they_were_after_the_check() -> None:
    model = seeded(Images)
    model.layer1.eval()
    before = model.norm.running_mean.clone()
    check_cut(model, on_images((2, 3, 9, 9)), ("layer2",))
    assert torch.equal(model.norm.running_mean, before)
    assert model.training and not model.layer1.training


def test_a_model_on_meta_is_compared_by_shapes() -> None:
    with torch.device("meta"):
        model = Gpt(GptPolicy(layers=2, width=8, heads=2, context=8, vocab=11, hidden=8))
    check_cut(model, lambda m: m(TOKENS.to("meta"), TOKENS.to("meta")), ("blocks.1",))
    assert all(p.is_meta for s in cut(model, ("blocks.1",), [0, 1]).values() for p in s.module.parameters())
