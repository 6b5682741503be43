"""RunConfig: the policies of all components together, and the reader of configuration files.

Files are YAML, JSON, or relaxed JSON (``config/relaxed_json.py``). An unknown key is an error at every level, and the
error suggests the nearest known key. A key given twice is an error. ``load(path, ["zero.stage=3"])`` overrides values
as ``--set`` on the command line does. A DeepSpeed configuration is recognised by its keys and translated
(``config/deepspeed.py``).
"""

import errno
import json
import re
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, PositiveFloat, PrivateAttr, ValidationError, model_validator

from shardwise.base.errors import ConfigError
from shardwise.base.policy import UNKNOWN, Policy, nearest
from shardwise.base.regular_files import read_small_file
from shardwise.checkpoint.policy import CheckpointPolicy
from shardwise.comm.policy import CommPolicy
from shardwise.config.batch import BatchPolicy, TrainPolicy
from shardwise.config.deepspeed import SHARED, from_base64, is_deepspeed, translate
from shardwise.config.foreign_keys import FOREIGN_VALUES, known_elsewhere
from shardwise.config.relaxed_json import read_json
from shardwise.data.policy import AnyDataPolicy, DataPolicy, with_kind
from shardwise.models.policy import ModelPolicy, TargetPolicy, reads_clicks, reads_images
from shardwise.observe.guard import GuardPolicy
from shardwise.observe.module_profile import ModuleProfilePolicy
from shardwise.observe.sinks import MonitorPolicy
from shardwise.optim.average import EmaPolicy
from shardwise.optim.policy import OptimizerPolicy
from shardwise.optim.schedule_policy import AnySchedulePolicy, SchedulePolicy
from shardwise.parallel.context.policy import ContextPolicy
from shardwise.parallel.embedding.policy import ExportPolicy, TablesPolicy
from shardwise.parallel.expert.policy import ExpertsPolicy
from shardwise.parallel.pipeline.policy import PipelinePolicy
from shardwise.parallel.tensor.policy import TensorPolicy
from shardwise.parallel.zero.policy import ZeroPolicy
from shardwise.passes.recompute import RecomputePolicy
from shardwise.passes.tiles import TilesPolicy
from shardwise.plan.mesh import MeshPolicy
from shardwise.precision.policy import PrecisionPolicy
from shardwise.tiers.offload import OffloadPolicy

ONE_WORD = {
    "precision": "compute",
    "compile": "scope",
    "attention": "backend",
    "recompute": "scope",
    "init_from": "path",
    "context": "method",
}
"""The key that a single word sets, for policies that accept a single word."""


_FILE_LIMIT_BYTES = 256 << 10
_VALUE_LIMIT = 200_000
"""Values of a configuration with its aliases written out, at most."""
_MERGE_LIMIT = 10_000
"""Keys of one mapping, with those that ``<<`` merges into it, at most."""
"""Limits that no real configuration reaches."""
_SHOWN = 300
"""Characters of a value that an error repeats, at most."""
_IN_ONE_LINE = 3
"""Faults that an error reports in one line, at most; more faults have one line each."""
_FAULTS = 20
"""Faults that one error names, at most."""


def _word_of(given: Any) -> Any:
    """Return ``off`` for False, because YAML reads ``off`` as false."""
    return "off" if given is False else given


class LossPolicy(Policy):
    """Keys under ``loss:``."""

    target: str
    """``module:function`` with the signature ``(model, batch) -> scalar loss``."""


class CompilePolicy(Policy):
    """Keys under ``compile:``; one word (``compile: blocks``) sets ``scope``."""

    scope: Literal["none", "blocks"] = "none"
    """The modules to compile: ``blocks`` compiles the forward pass of every Unit; the hooks stay outside of the
    compiled code, so gathers do not break the graph."""
    backend: str = "inductor"
    """The backend of torch.compile."""
    cuda_graphs: bool = False
    """True to record the code that inductor compiles as CUDA graphs and replay them: fewer kernel launches, but memory
    that stays allocated. Not yet measured on a device."""

    @model_validator(mode="before")
    @classmethod
    def _one_word(cls, given: Any) -> Any:
        return {"scope": given} if isinstance(given, str) else given


AttentionKernel = Literal["flash", "flash3", "cudnn", "efficient", "math"]


class AttentionPolicy(Policy):
    """Keys under ``attention:``; one word (``attention: cudnn``) sets ``backend``."""

    backend: (
        Literal["auto", "torch"] | AttentionKernel | Annotated[list[AttentionKernel], Field(min_length=1)]
    ) = "auto"
    """The kernels from which torch chooses for ``scaled_dot_product_attention`` while the engine is open. ``auto``:
    cuDNN first on NVIDIA devices of compute capability 9.x and 10.x, unless ``deterministic`` is true; elsewhere
    torch's choice. ``torch``: torch's choice. A name, or a list of names in their order: these kernels alone. A kernel
    that the device does not have is refused."""

    @model_validator(mode="before")
    @classmethod
    def _one_word(cls, given: Any) -> Any:
        return {"backend": given} if isinstance(given, str | list) else given


class InitFromPolicy(Policy):
    """Keys under ``init_from:``; one word (``init_from: FOLDER``) sets ``path``.

    Only weights are read: the optimizer, the step and the data start anew. A run that is resumed does not read
    ``path``.
    """

    path: str
    """The source of the weights: a safetensors file, a Hugging Face folder, or a run, its checkpoints or one step of
    them (with the tables)."""
    missing: list[str] = Field(default_factory=list)
    """Patterns of names (``head.*``) of weights and tables that may be missing from ``path`` or have another shape in
    it; these keep their initial values."""
    unexpected: list[str] = Field(default_factory=list)
    """Patterns of names that a checkpoint at ``path`` may contain although the model does not have them."""

    @model_validator(mode="before")
    @classmethod
    def _one_word(cls, given: Any) -> Any:
        return {"path": given} if isinstance(given, str) else given


class RunConfig(Policy):
    """All settings of a run; ``initialize`` takes the same keys without model, data and train."""

    model: ModelPolicy | None = None
    """The model: ``{name: gpt, layers: 6, ...}`` or ``{target: "module:function", ...}``."""
    init_from: InitFromPolicy | None = None
    """The source of start weights: a safetensors file, a Hugging Face folder or a checkpoint, read in slices."""
    data: AnyDataPolicy = Field(default_factory=DataPolicy)
    """Training and validation data: text, images, or clicks (``kind: clicks``); a click-through model always reads
    clicks."""
    loss: LossPolicy | None = None
    """The user's loss function; left out, the model returns the loss."""
    mesh: MeshPolicy = Field(default_factory=MeshPolicy)
    """The arrangement of the ranks in axes."""
    zero: ZeroPolicy = Field(default_factory=ZeroPolicy)
    """The cut of model state along "dp"."""
    tensor: TensorPolicy = Field(default_factory=TensorPolicy)
    """The cut of matrices along "tp"."""
    context: ContextPolicy = Field(default_factory=ContextPolicy)
    """The exchange of keys and values along "cp"."""
    experts: ExpertsPolicy = Field(default_factory=ExpertsPolicy)
    """The routing of rows to the experts of a mixture."""
    pipeline: PipelinePolicy = Field(default_factory=PipelinePolicy)
    """The cut of layers along "pp", and the order in which the stages run."""
    tables: TablesPolicy = Field(default_factory=TablesPolicy)
    """Embedding tables."""
    recompute: RecomputePolicy = Field(default_factory=RecomputePolicy)
    """The activations that the backward pass recomputes in place of keeping them."""
    tiles: TilesPolicy = Field(default_factory=TilesPolicy)
    """The layers that compute one tile of tokens at a time."""
    offload: OffloadPolicy = Field(default_factory=OffloadPolicy)
    """The state and activations that are kept off the device."""
    batch: BatchPolicy = Field(default_factory=BatchPolicy)
    """Batch sizes."""
    precision: PrecisionPolicy = Field(default_factory=PrecisionPolicy)
    """The dtypes of weights, gradients, reductions and masters."""
    optimizer: OptimizerPolicy = Field(default_factory=OptimizerPolicy)
    """The optimizer, which updates the weights."""
    schedule: AnySchedulePolicy = Field(default_factory=SchedulePolicy)
    """The schedule of learning rates and momenta over the steps."""
    max_grad_norm: PositiveFloat | None = None
    """The largest global norm of gradients; a larger norm is scaled down to it. Left out, gradients are not clipped."""
    ema: EmaPolicy | None = None
    """An exponential moving average of the weights, kept and saved beside the optimizer's moments."""
    compile: CompilePolicy = Field(default_factory=CompilePolicy)
    """torch.compile of the model's blocks."""
    attention: AttentionPolicy = Field(default_factory=AttentionPolicy)
    """The kernels of torch that compute attention."""
    batch_norm: Literal["per_rank", "synchronized"] = "per_rank"
    """The samples of batch statistics: each rank's own, or those of all ranks together."""
    check_first_step: Annotated[Literal["auto", "off"], BeforeValidator(_word_of)] = "auto"
    """The check of the first step of a model that is cut along "tp", "pp", "cp", "ep" or "etp" against the uncut model,
    before any weight changes: ``auto`` runs the check if the uncut model fits into memory."""
    deterministic: bool = False
    """True to compute the same bits in every run on the same ranks: torch uses kernels that sum in a fixed order while
    the engine is open, and an operation without such a kernel is an error. On a CPU most kernels sum in a fixed order
    anyway; on a device the key costs time."""
    comm: CommPolicy = Field(default_factory=CommPolicy)
    """The connection of the ranks, their data exchange, and their timeouts."""
    train: TrainPolicy = Field(default_factory=TrainPolicy)
    """The training loop."""
    checkpoint: CheckpointPolicy = Field(default_factory=CheckpointPolicy)
    """The times at which the state is saved."""
    export: ExportPolicy | None = None
    """Vectors of embedding tables for serving, written by the running job."""
    monitor: MonitorPolicy = Field(default_factory=MonitorPolicy)
    """The destinations of metrics."""
    module_profile: ModuleProfilePolicy | None = None
    """A profile of the cost of each module, in one step."""
    guard: GuardPolicy | None = None
    """A comparison of the state that has to be equal on several ranks, every so many steps."""
    output_dir: Annotated[str, Field(min_length=1, pattern=r"^[^\x00]*$")] = "runs/run"
    """The folder of the run."""
    _translated: str = PrivateAttr(default="")

    @property
    def translated(self) -> str:
        """The summary of a translation from another tool's configuration; empty for a Shardwise configuration."""
        return self._translated

    @property
    def tokens_per_step(self) -> int | None:
        """The tokens of a step on all ranks, with padding; None if the model does not give its sequence length."""
        own = self.model.keywords() if isinstance(self.model, TargetPolicy) else dict(self.model or ())
        context, samples = own.get("context"), self.batch.global_size
        return samples * context if samples and isinstance(context, int) else None

    @model_validator(mode="before")
    @classmethod
    def _model_decides_data(cls, given: Any) -> Any:
        if isinstance(given, dict) and reads_clicks(given.get("model")):
            return {**given, "data": with_kind(given.get("data"), "clicks")}
        if isinstance(given, dict) and reads_images(given.get("model")):
            return {**given, "data": with_kind(given.get("data"), "images")}
        return given

    def to_yaml(self) -> str:
        """Return the whole configuration as YAML, with defaults."""
        return yaml.safe_dump(self.model_dump(mode="json", exclude_none=True), sort_keys=False)

    @classmethod
    def parse(
        cls, given: Mapping[str, Any], where: str = "config", overrides: Sequence[str] = ()
    ) -> "RunConfig":
        """Check a dictionary and return its configuration.

        Args:
            given: The keys and values, into which ``overrides`` have been written already.
            where: The name of the source, for errors.
            overrides: The overrides, for errors.

        Raises:
            ConfigError: if a key or a value is wrong; the error names each by its path, and the override that it came
                from.
        """
        if not isinstance(given, Mapping):
            raise ConfigError(f"{where}: expected keys and values, found a {type(given).__name__}")
        try:
            return cls.model_validate(dict(given))
        except ValidationError as error:
            raise ConfigError(_explained(error, where, overrides)) from None


_FLAGS = ("bf16", "fp16")
_OF_TRANSFORMERS = frozenset(
    ("per_device_train_batch_size", "num_train_epochs", "learning_rate", "max_steps", "logging_steps")
)
"""Keys of transformers' TrainingArguments that no DeepSpeed configuration has."""
_OURS_ALONE = frozenset(RunConfig.model_fields) - frozenset(SHARED)
"""Keys of Shardwise's top level that DeepSpeed does not have."""


def load(source: "str | Path | Mapping[str, Any] | RunConfig", overrides: Sequence[str] = ()) -> RunConfig:
    """Read a configuration and return it as a RunConfig.

    Args:
        source: The path of a YAML or JSON file, a dictionary, or a RunConfig; also a DeepSpeed configuration as a
            path, a dictionary or base64.
        overrides: Values as ``a.b=c``, with Shardwise's keys.

    Raises:
        ConfigError: if the file cannot be read, or a key or a value is wrong.
    """
    if isinstance(source, RunConfig):
        if not overrides:
            return source
        given: dict[str, Any] = source.model_dump(mode="json", exclude_unset=True)
        where = "config"
    elif isinstance(source, Mapping):
        given, where = _plain(source), "config"
    else:
        given, where = _found(source)
    translated = ""
    if is_theirs(given):
        if both := sorted(set(given) & _OURS_ALONE):
            known = [f"{key!r}; here it is {ours}" for key in given if (ours := known_elsewhere("", key))]
            raise ConfigError(
                f"{where}: {', '.join(both)}: keys of ours in a DeepSpeed configuration; keep one kind: "
                f"{', '.join(known) or 'shardwise convert translates the other keys'}"
            )
        made = translate(given, where)
        given, translated = made.config, f"a DeepSpeed configuration: {made.summary()}"
    for override in overrides:
        _override(given, override)
    config = RunConfig.parse(given, where, overrides)
    config._translated = translated
    return config


def is_theirs(given: Mapping[str, Any]) -> bool:
    """Return True if ``given`` is a DeepSpeed configuration."""
    blocks: dict[str, type[Policy]] = {
        "optimizer": OptimizerPolicy,
        "pipeline": PipelinePolicy,
        "compile": CompilePolicy,
    }
    blocks["checkpoint"] = CheckpointPolicy
    # With TrainingArguments, ``fp16: true`` is transformers' flag; DeepSpeed's key of that name is a block.
    told = {
        key: value
        for key, value in given.items()
        if key not in _FLAGS or not isinstance(value, bool) or _OF_TRANSFORMERS.isdisjoint(given)
    }
    return is_deepspeed(told, {name: blocks[name].model_fields for name in SHARED})


def _found(source: str | Path) -> tuple[dict[str, Any], str]:
    """Return the dictionary in a file or in DeepSpeed's base64 form, and the source's name for errors."""
    if isinstance(source, str) and "." not in source and (found := from_base64(source)) is not None:
        return found, "config in base64"
    return read_file(Path(source)), str(source)


def read_file(path: Path) -> dict[str, Any]:
    """Return the dictionary in a YAML or JSON file.

    Raises:
        ConfigError: if the file cannot be read or parsed (with the line), or does not contain keys and values.
    """
    try:
        data = read_small_file(path, _FILE_LIMIT_BYTES)
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise ConfigError(
                f"config: {path} has more than {_FILE_LIMIT_BYTES >> 10} KiB; is it a configuration?"
            ) from None
        raise ConfigError(
            f"config: cannot read {path}: {error.strerror}; give the path of a YAML or JSON file"
        ) from None
    try:
        text = data.decode("utf-8-sig")
        given = _parsed(text, is_json=path.suffix in (".json", ".jsonc", ".json5", ".hjson"))
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"config: {path} is not text in UTF-8 (byte {error.start} is {data[error.start]:#04x}); save it as UTF-8"
        ) from None
    except RecursionError:
        raise ConfigError(f"config: {path} is nested too deeply, or refers to itself") from None
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"config: {path} does not parse: {_short(str(error))}") from None
    if given is None:
        given = {}
    if not isinstance(given, dict):
        raise ConfigError(f"config: {path} holds a {type(given).__name__}; expected keys and values")
    if _has_more_values_than(given, _VALUE_LIMIT):
        raise ConfigError(
            f"config: {path} has more than {_VALUE_LIMIT} values once its aliases are written out; is it a "
            "configuration?"
        )
    return given


def _has_more_values_than(content: Any, limit: int) -> bool:
    """Return True if nested dictionaries and lists, aliases written out, have more than ``limit`` values."""
    waiting, count = [content], 0
    while waiting and count <= limit:
        value = waiting.pop()
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | set) else ()
        count += 1 + len(inner)
        waiting.extend(each for each in inner if isinstance(each, dict | list | set))
    return count > limit


def _parsed(text: str, is_json: bool) -> Any:
    """Return the content of a text in YAML or JSON.

    Plain JSON is read by Python's parser, because the parser of relaxed JSON is slow.
    """
    if not is_json:
        return yaml.load(text, _UniqueKeys)
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError:
        return read_json(text)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(key for number, (key, _) in enumerate(pairs) if key in dict(pairs[:number]))
        raise ValueError(f"key {twice!r} is given twice")
    return found


def _shown(value: Any) -> str:
    try:
        return _short(repr(value))
    except ValueError:  # a number with more digits than Python converts to text
        return f"a {type(value).__name__} of very many digits"


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


class _UniqueKeys(yaml.SafeLoader):
    """A loader of YAML's plain types that raises an error for a key given twice."""

    def flatten_mapping(self, node: Any) -> None:
        """Merge the keys of ``<<``, and raise an error if they are too many, because nested merges multiply."""
        super().flatten_mapping(node)
        if len(node.value) > _MERGE_LIMIT:
            raise yaml.constructor.ConstructorError(
                None, None, f"more than {_MERGE_LIMIT} keys are merged into one mapping", node.start_mark
            )

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Build the dictionary of a mapping node, and raise an error if a key is given twice."""
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key!r} cannot be a key; expected a word", key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def _plain(value: Any) -> Any:
    """Return a copy of ``value`` with policies as plain data."""
    if isinstance(value, Policy):
        return value.model_dump(mode="json", exclude_unset=True)
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return value


def _override(given: dict[str, Any], text: str) -> None:
    path, separator, value = text.partition("=")
    if not separator or not path.strip():
        raise ConfigError(f"override {text!r}: expected key=value, as in zero.stage=3")
    try:
        parsed = yaml.load(value, _UniqueKeys)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(
            f"override {_short(repr(text))}: the value does not parse: {_short(str(error))}"
        ) from None
    *outer, last = path.strip().split(".")
    target = given
    for key in outer:
        inner = target.setdefault(key, {})
        if isinstance(inner, str) and key in ONE_WORD:
            inner = target[key] = {ONE_WORD[key]: inner}
        if not isinstance(inner, dict):
            raise ConfigError(f"override {text!r}: {key!r} is {inner!r}, which has no keys of its own")
        target = inner
    target[last] = parsed


def _explained(error: ValidationError, where: str, overrides: Sequence[str] = ()) -> str:
    lines, of_file = [], False
    listed = set()
    for detail in error.errors(include_url=False, include_context=False):
        steps = [str(part) for part in detail["loc"]]
        if steps[:1] in (["model"], ["data"], ["schedule"]) and len(steps) > 1:
            del steps[1]  # pydantic's tag of the union, which is not a key in the file
        path = ".".join(steps)
        message = detail["msg"].removeprefix("Value error, ")
        given = detail["input"]
        if message.startswith(UNKNOWN) and isinstance(given, str):
            ours = known_elsewhere(".".join(steps), given)
            message = f"{UNKNOWN} {given!r}; here it is {ours}" if ours else message
        message, known, names = message.partition("; known here: ")
        if known and names not in listed:  # list the known keys once for all unknown keys of a block
            listed.add(names)
            message += known + names
        shown = (
            f" (given {_shown(given)})"
            if not isinstance(given, Mapping | Policy) and "unknown key" not in message
            else ""
        )
        is_key = message.startswith(UNKNOWN) and isinstance(given, str)
        cause = _override_of(".".join([*steps, given]) if is_key else path, overrides)
        if detail["type"] == "literal_error" and isinstance(given, str):
            message += _near_value(given, message)
        of_file = of_file or not cause
        line = f"{_short(message)}{shown}"
        lines.append(cause + (f"{_short(path)}: {line}" if path else line))
    more = [f"and {len(lines) - _FAULTS} more"] if len(lines) > _FAULTS else []
    said = [*lines[:_FAULTS], *more]
    head = f"{where}: " if of_file else ""
    if len(said) <= _IN_ONE_LINE:
        return head + "; ".join(said)
    return "\n  ".join([f"{head or 'configuration: '}{len(lines)} faults:", *said])


def _override_of(path: str, overrides: Sequence[str]) -> str:
    """Return the override that a fault at ``path`` comes from, for the front of its sentence; empty if none does."""
    for override in reversed(overrides):
        key = override.partition("=")[0].strip()
        if path == key or path.startswith(f"{key}."):
            return f"--set {_short(override)}: "
    return ""


def _near_value(given: str, message: str) -> str:
    """Return ``; did you mean 'disk'?`` if an expected value is similar to ``given`` or another tool's word for it."""
    expected = re.findall(r"'([^']*)'", message)
    synonym = next((each for each in FOREIGN_VALUES.get(given.lower(), ()) if each in expected), None)
    if synonym is not None:
        return f"; did you mean {synonym!r}?"
    hint = nearest(given, expected)
    return hint if "did you mean" in hint else ""
