"""The part of every built-in model behind its vectors as a program: torch.export, and ONNX where its packages are."""

from pathlib import Path

import pytest
import torch

from shardwise.base.errors import UsageError
from shardwise.models.ctr.build import described
from shardwise.models.ctr.model import ClickModel
from shardwise.models.ctr.policy import CTR_POLICIES
from shardwise.models.dense_part import DensePart
from shardwise.serving.programs import DenseProgram, ProgramInputs, dense_part_of, write_program
from tests.serving.served import FEATURES, Own, built

NAMES = [
    pytest.param(name, marks=() if name == "dlrm" else pytest.mark.soak) for name in sorted(CTR_POLICIES)
]


def dense_of(model: torch.nn.Module) -> DensePart:
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return DensePart(tensors, {"click_model": described(model), "target": "my.models:build"})


def inputs(model: ClickModel, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(samples)
    width = model.tables.tables[0].width
    vectors = 0.3 * torch.randn(samples, len(FEATURES), width, generator=draws)  # as large as trained ones
    return torch.randn(samples, 3, generator=draws), vectors


@pytest.mark.parametrize("name", NAMES)
def test_the_exported_program_is_the_model(name: str, tmp_path: Path) -> None:
    model = built(name)
    features = write_program(dense_of(model), tmp_path, tmp_path / "dense.pt2")
    assert features == list(FEATURES) and [each.name for each in tmp_path.iterdir()] == ["dense.pt2"]
    program = torch.export.load(tmp_path / "dense.pt2").module()
    for samples in (1, 7):
        given = inputs(model, samples)  # type: ignore[arg-type]
        with torch.no_grad():
            wanted = model.logits(*given)  # type: ignore[operator]
            found = program(*given)
        assert found.shape == (samples,) and (found - wanted).abs().max() <= 1e-6
    planted = dense_of(model)
    first = next(each for each in planted.tensors.values() if each.numel() > 1)
    changed = DensePart({n: t + (t is first) for n, t in planted.tensors.items()}, planted.about)
    other = ProgramInputs(changed, tmp_path).program
    assert (other(*given) - found).abs().max() > 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_onnx_runtime_computes_the_same(name: str, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    onnx = pytest.importorskip("onnx")
    model = built(name)
    write_program(dense_of(model), tmp_path, tmp_path / "dense.onnx")
    told = {each.key: each.value for each in onnx.load(tmp_path / "dense.onnx").metadata_props}
    assert told["features"] == ",".join(FEATURES)
    session = runtime.InferenceSession(tmp_path / "dense.onnx")
    assert [each.name for each in session.get_outputs()] == ["logits"]
    names = [each.name for each in session.get_inputs()]
    for samples in (1, 7):
        given = dict(zip(("dense", "vectors"), inputs(model, samples), strict=True))  # type: ignore[arg-type]
        with torch.no_grad():
            wanted = DenseProgram(built(name))(*given.values())  # type: ignore[arg-type]
        (found,) = session.run(None, {each: given[each].numpy() for each in names})
        assert (torch.from_numpy(found) - wanted).abs().max() <= 1e-6


def test_other_models_and_forms_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"a model of your own \(model.target: 'my.models:build'\); programs are"
    ):
        write_program(dense_of(Own()), tmp_path, tmp_path / "dense.pt2")
    with pytest.raises(UsageError, match=r"is written as .onnx \(ONNX\) or .pt2"):
        write_program(dense_of(built("dlrm")), tmp_path, tmp_path / "dense.pb")
    assert not list(tmp_path.iterdir())


def test_without_its_packages_onnx_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnxscript", None)
    pytest.importorskip("onnx")
    with pytest.raises(UsageError, match=r"onnxscript is not installed: pip install onnx onnxscript"):
        write_program(dense_of(built("dlrm")), tmp_path, tmp_path / "dense.onnx")


def test_a_folder_without_a_dense_part_is_refused(tmp_path: Path) -> None:
    from shardwise.models.vectors import write_vectors

    write_vectors(tmp_path, [], 1)
    with pytest.raises(UsageError, match="without the dense part of a model; export the run again"):
        dense_part_of(tmp_path, None)
