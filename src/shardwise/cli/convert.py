"""``shardwise convert SOURCE OUT``: convert data, checkpoints and configurations from one form to another.

text (a file, a folder, stdlib)      a token file that training maps into memory
click logs, into a .clicks file      packed clicks: Criteo text, CSV (both also .gz), Parquet, folders of them
a run, its checkpoints or one step   a folder that Hugging Face's from_pretrained opens; of a model with embedding
                                     tables the tables' (key, vector) pairs, for serving; with --experts a checkpoint
                                     of the same GPT with experts, each a copy of its feed-forward part
a folder of transformers             a checkpoint of our GPT: what save_pretrained, or a step of its Trainer, left of a
                                     llama, mistral, mixtral or gpt2 (weights only; init_from reads such a folder as it
                                     is)
a .pt, .pth or .bin of torch         a safetensors file; no code in it is executed
a checkpoint that DeepSpeed saved    a folder of checkpoints of ours, which any layout loads; no code in it is executed
a DeepSpeed configuration, into      our configuration; the fate of every key is printed
  a .yaml file
"""

import math
import shutil
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.base.errors import CheckpointError, ConfigError, DamagedError, UsageError
from shardwise.base.regular_files import expanded
from shardwise.base.words import bytes_text, counted, printable
from shardwise.cli.runs.chosen_step import NEWEST, StepOption, check_word, step_at

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from shardwise.checkpoint import StepSummary
    from shardwise.data.clicks import ClickSchema
    from shardwise.models import GptPolicy
    from shardwise.models.source import WeightSource
    from shardwise.models.upcycle import ComputedTensor

_PICKLES = (".pt", ".pth", ".bin")
_PROGRAMS = {"onnx": ".onnx", "export": ".pt2"}
"""The ending of a program's file, by the word of ``--to``."""
_TRIES = 5
"""Number of newest steps that are tried while a run removes older steps."""


_Source = Annotated[
    str,
    typer.Argument(
        help="Text (a file, a folder or 'stdlib'), click logs, a run or checkpoint, a Hugging Face folder, a .pt, "
        "a DeepSpeed configuration."
    ),
]
_Out = Annotated[
    Path,
    typer.Argument(
        help="The token file, .clicks file, Hugging Face folder, folder of vectors, folder of checkpoints, "
        "safetensors file or .yaml to write."
    ),
]
_Tokenizer = Annotated[
    str, typer.Option("--tokenizer", help="For text: 'bytes', or the path of a tokenizer.json.")
]
_Pattern = Annotated[
    str, typer.Option("--pattern", help="For text and click logs: which files of a folder are read.")
]
_Label = Annotated[str, typer.Option("--label", help="For Parquet and CSV: the column of the label.")]
_Dense = Annotated[
    str | None,
    typer.Option("--dense", help="For Parquet and CSV: columns that are numbers, with commas between."),
]
_Sparse = Annotated[str | None, typer.Option("--sparse", help="For Parquet and CSV: columns that are keys.")]
_Separator = Annotated[
    str | None,
    typer.Option("--separator", help="For text with a header that is not called .csv or .tsv."),
]
_MalformedLimit = Annotated[
    int, typer.Option("--malformed-limit", min=0, help="For click logs: rows that may be skipped.")
]
_To = Annotated[
    str | None,
    typer.Option(
        "--to",
        metavar="FORM",
        help="Of a run of a built-in click-through model: onnx or export (torch.export), the part behind the vectors "
        "as a program. Left out: by the ending of OUT, .onnx or .pt2.",
    ),
]
_Since = Annotated[
    int | None,
    typer.Option(
        "--since",
        min=0,
        help="For a run with embedding tables: write the rows that came, changed and went since this step, which must "
        "be among the checkpoints, and the dense part.",
    ),
]
_Vectors = Annotated[
    str,
    typer.Option(
        "--vectors",
        metavar="FORM",
        help="Of a run with embedding tables: the numbers of the vectors in files, fp32, fp16, bf16 or int8.",
    ),
]
_Experts = Annotated[
    str | None,
    typer.Option(
        "--experts",
        help="For a run of a dense gpt: model.experts of the one that starts as it, as {count: 8}.",
    ),
]


def command(
    source: _Source,
    out: _Out,
    tokenizer: _Tokenizer = "bytes",
    pattern: _Pattern = "*",
    label: _Label = "label",
    dense: _Dense = None,
    sparse: _Sparse = None,
    separator: _Separator = None,
    malformed_limit: _MalformedLimit = 0,
    experts: _Experts = None,
    step: StepOption = NEWEST,
    to: _To = None,
    since: _Since = None,
    vectors: _Vectors = "fp32",
) -> None:
    """Turn data, checkpoints and configurations into other forms.

    Text becomes tokens, click logs packed clicks, a checkpoint Hugging Face's form, a folder for serving or a program,
    and back, a .pt tensors, a DeepSpeed configuration ours.
    """
    path = Path(source)
    check_word(step)
    if step != NEWEST and not _is_checkpoint(path):
        raise UsageError(f"convert: --step {step} names a step of a run, and {source} holds no checkpoint")
    if experts is not None:
        _upcycle(path, out, experts, step)
        return
    if since is not None:
        if to is not None or out.suffix in _PROGRAMS.values() or vectors != "fp32":
            _refuse_forms(out)
        _export_since(path, out, since, step)
        return
    if out.suffix in (".yaml", ".yml"):
        _translate(path, out)
        return
    if to is not None or out.suffix in _PROGRAMS.values():
        _program(path, out, to, step)
        return
    if path.suffix in _PICKLES and path.is_file():
        _weights(path, out)
    elif out.suffix == ".clicks":
        schema = _columns(dense, sparse)
        _pack(
            source,
            out,
            pattern=pattern,
            schema=schema,
            label=label,
            malformed_limit=malformed_limit,
            separator=separator,
        )
    elif any(path.glob("*_states.pt")) or any(path.glob("*/*_states.pt")):
        _from_deepspeed(path, out)
    elif _is_checkpoint(path):
        _export(path, out, step, vectors)
    elif (path / "config.json").is_file() and any(path.glob("*.safetensors")):
        _import(path, out)
    else:
        _tokenise(source, out, tokenizer, pattern)


def _refuse_forms(out: Path) -> None:
    raise UsageError(
        "convert: --since writes an increment of vectors in fp32 into a folder; leave out --to and --vectors, and give "
        f"a folder instead of {out}"
    )


def _program(source: Path, out: Path, form: str | None, which: str) -> None:
    """Write the part of a click-through model behind its vectors as a program."""
    from shardwise.serving.programs import dense_part_of, write_program

    if form is not None and form not in _PROGRAMS:
        raise UsageError(f"convert: --to {form}; expected {' or '.join(_PROGRAMS)}")
    if form is not None and out.suffix != _PROGRAMS[form]:
        raise UsageError(
            f"convert: --to {form} writes a {_PROGRAMS[form]} file; name it so, as in {out.stem}{_PROGRAMS[form]}"
        )
    step = step_at(source, which).path if _is_checkpoint(source) else None
    features = write_program(dense_part_of(source, step), source, out)
    typer.echo(
        f"{out}: logits(dense, vectors) of {source if step is None else step}; vectors are those of "
        f"{', '.join(features)}, as shardwise.Scorer(...).vectors returns them"
    )


def _from_deepspeed(source: Path, out: Path) -> None:
    from shardwise.deepspeed.files.their_checkpoint import convert, find_step

    step = find_step(source)
    if step is None:
        raise UsageError(
            f"convert: {source} holds steps that DeepSpeed saved, and no `latest`; name one of them"
        )
    left_out = convert(step, out)
    typer.echo(f"{out}: the step that DeepSpeed saved in {step}")
    for line in left_out:
        typer.echo(f"left out: {line}")


def _translate(source: Path, out: Path) -> None:
    import yaml

    from shardwise.config.deepspeed import translate
    from shardwise.config.run import RunConfig, is_theirs, read_file

    given = read_file(source)
    if not is_theirs(given):
        raise UsageError(
            f"convert: {source} becomes a configuration, and it holds no key of DeepSpeed's; give a ds_config.json"
        )
    made = translate(given, str(source))
    RunConfig.parse(made.config, str(source))
    out.write_text(yaml.safe_dump(made.config, sort_keys=False), encoding="utf-8")
    for note in made.notes:
        typer.echo(printable(str(note)))
    typer.echo(
        f"{out}: add model, data and train for shardwise train; shardwise.initialize takes it as it is"
    )


def _is_checkpoint(path: Path) -> bool:
    from shardwise.cli.runs.run_folder import RunFolder

    here = RunFolder(path)
    return (
        here.has_checkpoints() or (path / "manifest.json").is_file() or any(path.glob("step_*/manifest.json"))
    )


def _tokenise(source: str, out: Path, tokenizer: str, pattern: str) -> None:
    if (Path(source) / "emb_vector").is_file():
        raise UsageError(
            f"convert: {source} holds the binary files of a sparse model of HugeCTR (key, emb_vector) and no text; "
            "its rows are not read"
        )
    from rich.console import Console
    from rich.progress import Progress

    from shardwise.data import convert, load_tokenizer
    from shardwise.observe.progress import count_text

    console = Console()
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("tokenising", total=None)
        made = convert(
            source,
            load_tokenizer(tokenizer),
            out,
            pattern=pattern,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    size, documents = bytes_text(out.stat().st_size), len(made.ends)
    typer.echo(
        f"{out}: {source} read as text: {count_text(made.count)} tokens, {counted(documents, 'document')}, {size}, "
        f"{made.tokenizer_name}"
    )


def _columns(dense: str | None, sparse: str | None) -> "ClickSchema | None":
    """Return the named columns, or None if types decide."""
    from shardwise.data.clicks import ClickSchema, SparseFeature

    if dense is None and sparse is None:
        return None
    if dense is None or sparse is None:
        raise ConfigError(
            "--dense and --sparse name the columns together; give both, one of them empty if need be, or neither"
        )
    numbers, keys = ([name for name in names.split(",") if name] for names in (dense, sparse))
    return ClickSchema(tuple(numbers), tuple(SparseFeature(name) for name in keys))


def _pack(source: str, out: Path, **options: Any) -> None:
    from rich.console import Console
    from rich.progress import Progress

    from shardwise.data.clicks import convert_clicks
    from shardwise.observe.progress import count_text

    console = Console()
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("packing", total=None)
        made = convert_clicks(
            source,
            out,
            **options,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    columns = f"{len(made.schema.dense)} numbers, {len(made.schema.features)} features"
    skipped = f", {made.skipped} malformed rows skipped" if made.skipped else ""
    typer.echo(f"{out}: {count_text(len(made))} rows, {columns}, {bytes_text(out.stat().st_size)}{skipped}")


def _export(source: Path, out: Path, which: str = NEWEST, vectors: str = "fp32") -> None:
    """Write a step of ``source``, with vectors of a form if it has tables."""
    if out.is_file():
        raise UsageError(f"convert: {out} is a file; a run is written into a folder, so give another name")
    _of_step(source, out, which, partial(_export_step, source=source, out=out, vectors=vectors))


def _of_step(source: Path, out: Path, which: str, export: "Callable[[StepSummary], None]") -> None:
    """Export a step of ``source``.

    A run that saves meanwhile may remove the step that was found (``checkpoint.keep_last``); the newest, or the best,
    of those that are left is used then.
    """
    for left in reversed(range(_TRIES)):
        step = step_at(source, which)
        try:
            export(step)
            return
        except (CheckpointError, OSError):
            is_gone = not (step.path / "manifest.json").is_file()
            if not (left and is_gone) or out.exists():
                raise


def _export_step(step: "StepSummary", source: Path, out: Path, vectors: str) -> None:
    from shardwise.checkpoint import verify
    from shardwise.cli.runs.trained import gpt_of, tokenizer_of
    from shardwise.data import DataPolicy
    from shardwise.models import open_weights, write_huggingface

    if any(row.kind == "table" for row in step.tensors):
        _export_tables(step.path, out, vectors)
        return
    policy, config = gpt_of(step)
    if damage := verify(step.path):
        raise DamagedError(f"{step.path}: {damage[0]}; nothing was exported")
    weights = open_weights(step.path / "model", policy)
    write_huggingface(out, policy, ((name, _whole(weights, name)) for name in weights.names()))
    assert isinstance(config.data, DataPolicy), "a language model's data is text"
    if (tokenizer := tokenizer_of(config)) != "bytes":
        given = expanded(tokenizer)
        shutil.copyfile(given / "tokenizer.json" if given.is_dir() else given, out / "tokenizer.json")
    typer.echo(f"{out}: step {step.step} of {source}, for transformers' from_pretrained")


def _import(source: Path, out: Path) -> None:
    from shardwise.models import gpt_policy_from_huggingface, open_weights
    from shardwise.models.upcycle import ComputedTensor

    policy = gpt_policy_from_huggingface(source).resolved()
    weights = open_weights(source, policy)
    tokenizer = source / "tokenizer.json"
    data = {"data": {"tokenizer": str(tokenizer.resolve())}} if tokenizer.is_file() else {}
    tensors = {
        name: ComputedTensor(weights.shape(name), weights.dtype(name), partial(_whole, weights, name))
        for name in weights.names()
    }
    _save_start(out, policy, data, tensors)
    typer.echo(f"{out}: step 0 with the weights of {source}; a run begins with them by init_from: {out}")


def _upcycle(source: Path, out: Path, experts: str, which: str) -> None:
    from shardwise.checkpoint import verify
    from shardwise.cli.runs.trained import gpt_of, tokenizer_of
    from shardwise.config.run import RunConfig
    from shardwise.models import GptPolicy, open_weights
    from shardwise.models.upcycle import upcycled, upcycled_policy

    step = step_at(source, which)
    dense, config = gpt_of(step)
    keys = _keys(experts)
    if not isinstance(keys, dict):
        raise ConfigError(f"--experts: {experts!r} names no keys; expected {{count: 8}}, say")
    model = {"name": "gpt", **dense.model_dump(exclude={"name"}), "experts": keys}
    given = RunConfig.parse({"model": model}, "--experts").model
    assert isinstance(given, GptPolicy) and given.experts is not None, "a gpt with keys under experts"
    policy = upcycled_policy(dense, given.experts)
    if damage := verify(step.path):
        raise DamagedError(f"{step.path}: {damage[0]}; nothing was converted")
    weights = open_weights(step.path / "model", dense)
    tensors = upcycled(policy, partial(_whole, weights), weights.dtype, config.train.seed)
    _save_start(out, policy, {"data": {"tokenizer": tokenizer_of(config)}}, tensors)
    count = policy.experts.count if policy.experts else 0
    typer.echo(
        f"{out}: step 0, {count} experts a block as step {step.step} of {source}; a run begins with them by "
        f"init_from: {out}"
    )


def _keys(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--experts: {text!r} is no YAML ({error}); expected {{count: 8}}, say") from None


def _whole(weights: "WeightSource", name: str) -> "Tensor":
    shape = weights.shape(name)
    return weights.read(name, 0, math.prod(shape)).view(shape)


def _save_start(
    out: Path, policy: "GptPolicy", data: dict[str, Any], tensors: "Mapping[str, ComputedTensor]"
) -> None:
    """Save a step 0 from which a run may start. Each tensor is made when it is written."""
    from shardwise.checkpoint import Checkpoints, FlatSlice, TensorPieces
    from shardwise.checkpoint.piece import ElementSource, LazySlice
    from shardwise.config.run import RunConfig

    if _is_checkpoint(out):
        raise UsageError(f"convert: {out} holds checkpoints already; choose another folder")

    @lru_cache(1)
    def flat(name: str) -> "Tensor":
        return tensors[name].make().reshape(-1)

    def item(name: str, made: "ComputedTensor") -> TensorPieces:
        def read(start: int, stop: int) -> "Tensor":
            return flat(name)[start:stop]

        def write(start: int, values: "Tensor") -> None:
            assert not values.numel(), f"{name} is read here alone"

        elements = math.prod(made.shape)
        pieces = [FlatSlice(0, elements, LazySlice(ElementSource(read, write), elements, made.dtype))]
        return TensorPieces("weight", name, made.shape, made.dtype, pieces)

    config = RunConfig.parse({"model": {"name": "gpt", **policy.model_dump(exclude={"name"})}, **data})
    user = {"config": config.model_dump(mode="json", exclude_none=True)}
    items = [item(name, made) for name, made in tensors.items()]
    Checkpoints(out).save(0, items, {"engine": {"step": 0}, "user": user}, asynchronous=False)


def _export_tables(step: Path, out: Path, vectors: str) -> None:
    from shardwise.models.vector_codes import FORMS
    from shardwise.observe.progress import count_text
    from shardwise.serving.export import export_step

    if vectors not in FORMS:
        raise UsageError(f"convert: --vectors {vectors}; expected {', '.join(FORMS)}")
    done = export_step(step, out, FORMS[vectors])
    typer.echo(
        f"{out}: step {done.step}, {len(done.tables)} tables, {count_text(done.rows)} rows, for shardwise.Scorer and "
        "shardwise.Vectors"
    )


def _export_since(source: Path, out: Path, since: int, which: str = NEWEST) -> None:
    """Write the differences of the tables between step ``since`` and a later step of ``source``."""
    if not _is_checkpoint(source):
        raise UsageError(
            f"convert --since {since}: {source} holds no checkpoints; give a run with embedding tables, its "
            "checkpoints or one step of them"
        )
    _of_step(source, out, which, partial(_export_changes, out=out, since=since))


def _export_changes(step: "StepSummary", out: Path, since: int) -> None:
    from shardwise.checkpoint.steps import step_name
    from shardwise.observe.progress import count_text
    from shardwise.serving.export import export_changes

    older = step.path.parent / step_name(since)
    if not any(row.kind == "table" for row in step.tensors):
        raise UsageError(f"convert --since {since}: {step.path} holds no embedding tables; leave out --since")
    if since >= step.step:
        raise UsageError(
            f"convert --since {since}: the newest step of {step.path.parent} is {step.step}; name an older one"
        )
    _check_is_there(older, since)
    try:
        done = export_changes(older, step.path, out)
    except (CheckpointError, OSError):
        _check_is_there(older, since)
        raise
    changed, gone = count_text(done.changed), count_text(done.gone)
    typer.echo(
        f"{out}: step {since} to {done.step}, {len(done.tables)} tables, {changed} rows came or changed, {gone} went, "
        f"and the dense part, {bytes_text(done.dense.to_write().nbytes)}, for Scorer.apply and Vectors.apply"
    )


def _check_is_there(older: Path, since: int) -> None:
    """Raise UsageError if the folder has no step to compare with, for example because a run has removed it."""
    if (older / "manifest.json").is_file():
        return
    steps = sorted(int(each.name[5:]) for each in older.parent.glob("step_" + "[0-9]" * 8))
    raise UsageError(
        f"convert --since {since}: there is no step {older} to compare with; there are {', '.join(map(str, steps))}. "
        "Keep more steps with checkpoint.keep_last or keep_every, or export from the running job with export.every"
    )


def _weights(source: Path, out: Path) -> None:
    from shardwise.formats.safetensors import SafetensorsWriter
    from shardwise.models.torch_file import read_torch_file, summary

    if out.suffix != ".safetensors":
        raise UsageError(
            f"convert: {source} becomes a safetensors file; name it so, as in {out.stem}.safetensors"
        )
    tensors, left_out = read_torch_file(source)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    with SafetensorsWriter(out, shapes, dtypes) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    typer.echo(f"{out}: {len(tensors)} tensors")
    if left_out:
        typer.echo(printable(summary(left_out)))
