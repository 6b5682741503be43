"""The part of a click-through model behind its vectors as a program for other runtimes: ONNX, or torch.export.

    logits = program(dense, vectors)         dense [B, N], vectors [B, F, W]: one vector for each feature

    shardwise convert runs/clicks dense.onnx          # for ONNX Runtime and others
    shardwise convert runs/clicks dense.pt2           # for torch.export.load

The lookup stays outside, because tables are larger than a program: ``Scorer.vectors`` returns the second input. The
number of samples is free. Only the built-in models have such a part.

A program is of one step and stays so, while a Scorer goes on with increments: give it the vectors of its own step.

Shapes: B samples, F features, N dense features, W width of rows.
"""

import contextlib
import io
import os
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from shardwise.base.errors import ShardwiseError, UsageError
from shardwise.models.ctr.model import ClickModel, widened
from shardwise.models.dense_part import DensePart
from shardwise.models.vectors import Vectors
from shardwise.serving.dense_model import built_in, dtype_of, fill
from shardwise.serving.export import opened_step

ONNX, EXPORTED = ".onnx", ".pt2"
_SAMPLES = 2
"""Samples of the inputs with which a program is traced."""


class DenseProgram(nn.Module):
    """The part of a click-through model behind its vectors.

    Args:
        model: The model; its tables are taken away from it.
    """

    def __init__(self, model: ClickModel) -> None:
        super().__init__()
        del model.tables
        self.model = model

    def forward(self, dense: Tensor, vectors: Tensor) -> Tensor:
        """Return the logits [B] of dense features [B, N] and vectors [B, F, W]."""
        return widened(self.model.logits(dense, vectors))


class ProgramInputs:
    """The inputs of the program of a model, and the program.

    Args:
        dense: The dense part of the model.
        folder: The folder that it is from, for errors.

    Raises:
        UsageError: if the model is not one of the built-in ones.
    """

    def __init__(self, dense: DensePart, folder: Path) -> None:
        way = "programs are made of the built-in click-through models, whose logits(dense, vectors) is known"
        model = built_in(dense, folder, way).to(dtype_of(dense))
        fill(model, dense.tensors, folder)
        self.features: Sequence[str] = [name for table in model.tables.tables for name in table.feature_names]
        """The features in the order of ``vectors``."""
        width = model.tables.tables[0].width
        self.inputs = (
            torch.zeros(_SAMPLES, model.dense, dtype=dtype_of(dense)),
            torch.zeros(_SAMPLES, len(self.features), width, dtype=dtype_of(dense)),
        )
        self.program = DenseProgram(model).eval().requires_grad_(False)

    def exported(self) -> torch.export.ExportedProgram:
        """Return the program of torch.export, for any number of samples."""
        samples = torch.export.Dim("samples", min=1)
        shapes = {"dense": {0: samples}, "vectors": {0: samples}}
        with torch.no_grad():
            return torch.export.export(self.program, self.inputs, dynamic_shapes=shapes)


def dense_part_of(source: Path, step: Path | None) -> DensePart:
    """Return the dense part of a saved step, or of a folder for serving.

    Args:
        source: The folder for serving, if ``step`` is None.
        step: Folder of the step.

    Raises:
        DamagedError: if the step is damaged.
        UsageError: if the folder has no dense part, or the step no tables.
    """
    if step is not None:
        return opened_step(step).dense
    dense = Vectors(source).dense
    if dense is None:
        raise UsageError(f"{source}: holds vectors without the dense part of a model; export the run again")
    return dense


def write_program(dense: DensePart, folder: Path, out: Path) -> list[str]:
    """Write the part of a model behind its vectors as a program; the file appears whole or not at all.

    Args:
        dense: The dense part of the model.
        folder: The folder that it is from, for errors.
        out: The file: ``.onnx`` or ``.pt2``.

    Returns:
        The features in the order of the input ``vectors``.

    Raises:
        UsageError: if the model is not one of the built-in ones, the suffix is another, or packages are missing.
    """
    if out.suffix not in (ONNX, EXPORTED):
        raise UsageError(f"{out}: a program is written as {ONNX} (ONNX) or {EXPORTED} (torch.export)")
    if out.suffix == ONNX:
        _check_packages()
    made = ProgramInputs(dense, folder)
    content = _as_onnx(made) if out.suffix == ONNX else _as_archive(made)
    part = out.with_name(f"{out.name}.part")
    try:
        part.write_bytes(content)
        os.replace(part, out)
    finally:
        part.unlink(missing_ok=True)
    return list(made.features)


def _as_archive(made: ProgramInputs) -> bytes:
    stream = io.BytesIO()
    torch.export.save(made.exported(), stream)
    return stream.getvalue()


def _check_packages() -> None:
    """Raise UsageError if the packages that write ONNX are not installed."""
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"ONNX is written by the packages onnx and onnxscript, and {error.name} is not installed: pip install onnx "
            f"onnxscript; or write a {EXPORTED} file, which torch alone writes and reads"
        ) from None


def _as_onnx(made: ProgramInputs) -> bytes:
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):  # torch prints its progress
        warnings.simplefilter("ignore")  # torch warns of what its own exporter calls
        program = torch.onnx.export(
            made.exported(),
            input_names=["dense", "vectors"],
            output_names=["logits"],
            dynamo=True,
            verbose=False,
        )
    if program is None:
        raise ShardwiseError("torch.onnx returned no program")
    model = program.model_proto
    for key, value in {"features": ",".join(made.features)}.items():
        model.metadata_props.add(key=key, value=value)
    content: bytes = model.SerializeToString()
    return content
