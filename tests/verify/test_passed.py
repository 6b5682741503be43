"""Records of passes: a run that a record fits says so, and one that none fits says what differs."""

from pathlib import Path
from typing import Any

from torch import nn

from shardwise.config.run import load
from shardwise.verify.layout import parse_layout
from shardwise.verify.passed import keep, proof_of, sentence, sentence_of_run
from shardwise.verify.verdict import PassReport, Verdict

MODEL = {"name": "gpt", "layers": 12, "width": 64, "heads": 4, "context": 64, "vocab": 256}


def config(**more: Any) -> Any:
    return load({"model": MODEL, "mesh": {"tp": 4}, "zero": {"stage": 2}, **more})


def passed() -> Verdict:
    return Verdict("pass", "dp=2,tp=2,zero=2", 4, passes=[PassReport("fp64")])


def test_a_run_of_a_verified_layout_says_on_which_it_was_verified(tmp_path: Path) -> None:
    assert "not verified: no pass" in sentence_of_run(config(), 8, tmp_path)
    assert keep(proof_of(config(), parse_layout("dp=2,tp=4")), passed(), tmp_path) is not None
    assert sentence_of_run(config(), 8, tmp_path).startswith("verified on dp=2,tp=2,zero=2 (2")
    # Sizes, rates and places are no part of the proof, because verify shrinks a model.
    other = config(optimizer={"lr": 0.5}, model=MODEL | {"layers": 4}, output_dir="elsewhere")
    assert sentence_of_run(other, 16, tmp_path).startswith("verified on")
    assert sentence_of_run(config(), 1, tmp_path) == ""


def test_what_differs_from_the_record_is_named(tmp_path: Path) -> None:
    keep(proof_of(config(), parse_layout("dp=2,tp=4")), passed(), tmp_path)
    for more, ranks, word in (
        ({"precision": "bf16"}, 8, "keys.precision"),
        ({"zero": {"stage": 3}}, 8, "axes.zero.stage"),
        ({"optimizer": {"type": "sgd"}}, 8, "keys.optimizer"),
        ({"mesh": {"pp": 2, "tp": 2}}, 8, "axes.above 1"),
    ):
        said = sentence_of_run(config(**more), ranks, tmp_path)
        assert said.startswith("not verified") and word in said and "shardwise verify" in said, said


def test_a_failed_run_leaves_no_record_and_a_damaged_one_is_passed_over(tmp_path: Path) -> None:
    failed = Verdict("fail", "tp=2", 2, passes=[PassReport("fp64")])
    proof = proof_of(config(), parse_layout("tp=4"))
    assert keep(proof, failed, tmp_path) is None and not [*tmp_path.iterdir()]
    (tmp_path / "broken.json").write_text("{")
    assert sentence(proof, "shardwise verify", tmp_path).startswith("not verified")


def test_the_code_of_a_users_model_is_that_of_its_file(tmp_path: Path) -> None:
    """A change of the file of the function that makes the model makes the record void."""
    layout = parse_layout("dp=2")
    one, other = (proof_of(load({}), layout, make) for make in (nn.Identity, passed))
    assert one.code != other.code
    target = proof_of(load({}), layout, "tests.verify.test_passed:passed")
    assert (
        target.code == proof_of(load({"model": {"target": "tests.verify.test_passed:passed"}}), layout).code
    )
