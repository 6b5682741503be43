"""From a DeepSpeed configuration to ours, with a word on what became of every key.

    made = translate({"train_batch_size": 32, "zero_optimization": {"stage": 2}})
    made.config     {"batch": {"global_size": 32, ...}, "zero": {"stage": 2}, ...}    for RunConfig.parse, or as YAML
    made.values     every key of theirs by its path: given, resolved from "auto", or their default; old names translated
    made.notes      a Note per key that was given, and per default of theirs that is not ours

The table is ``config/deepspeed_keys.py``; the functions below fill our blocks, one for each. Unknown keys, wrong values
and what is refused are one ConfigError that names every fault by its path. ``config.run.load`` comes here with a file
or dictionary that ``is_deepspeed`` recognises.
"""

import base64
import binascii
import json
import math
import posixpath
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch.optim import lr_scheduler

from shardwise.config.deepspeed_keys import KEYS, REQUIRED, DeepSpeedKey
from shardwise.config.relaxed_json import read_json
from shardwise.plan.errors import ConfigError
from shardwise.plan.policy import nearest

_SHOWN = 80
_FAULTS = 20
SHARED = ("optimizer", "pipeline", "compile", "checkpoint")
"""Blocks of the top level that DeepSpeed and we have."""


class Note(NamedTuple):
    """What became of one key."""

    path: str
    given: Any
    fate: str
    """``does``, ``idle``; ``default`` of a key that was left out and acts here by their default."""
    said: str

    def __str__(self) -> str:
        marks = {"does": "->", "idle": "no effect here:", "default": "left out, so as there:"}
        return f"{self.path}: {_shown(self.given, self.path)} {marks[self.fate]} {self.said}"


class Translation(NamedTuple):
    """A DeepSpeed configuration in our words."""

    config: dict[str, Any]
    values: dict[str, Any]
    notes: tuple[Note, ...]

    def summary(self) -> str:
        """One sentence for the log."""
        idle = [note.path for note in self.notes if note.fate == "idle"]
        acts = sum(note.fate == "does" for note in self.notes)
        rest = f"; {len(idle)} have no effect here: {', '.join(idle)}" if idle else ""
        return f"{acts} keys act{rest} (shardwise convert says what became of each)"


def is_deepspeed(given: Mapping[str, Any], shared: Mapping[str, Iterable[str]]) -> bool:
    """True of a configuration with a key that DeepSpeed has and we have not. ``shared`` are the blocks of the top level
    that both have, and our keys in them."""
    inner = {name: value for name in shared if isinstance(value := given.get(name), Mapping)}
    theirs = {name: {*_CHILDREN[name]} - {*shared[name]} for name in inner}
    return any(key in _CHILDREN[""] and key not in shared for key in given) or any(
        theirs[name] & {*keys} for name, keys in inner.items()
    )


def from_base64(text: str) -> dict[str, Any] | None:
    """The configuration in url-safe base64, DeepSpeed's form for a command line; None where ``text`` is none."""
    try:
        found = read_json(base64.urlsafe_b64decode(text.encode("ascii")).decode("utf-8"))
    except (ValueError, binascii.Error):
        return None
    return found if isinstance(found, dict) else None


def translate(
    given: Mapping[str, Any], where: str = "config", auto: Mapping[str, Any] | None = None
) -> Translation:
    """``given``, a DeepSpeed configuration, in our keys.

    where   what errors call it
    auto    what ``"auto"`` stands for, by path (``{"optimizer.params.lr": 3e-4}``); what is not named there takes the
            default, batch sizes follow from one another, and fp16, bf16 from the model

    Errors: ConfigError.
    """
    reading = _Reading(auto or {})
    reading.read(given)
    view = _View(reading)
    config: dict[str, Any] = {}
    for name, fill in _BLOCKS.items():
        if (found := fill(view)) not in ({}, None):
            config[name] = found
    faults = reading.faults + view.faults
    if faults:
        more = f"; and {len(faults) - _FAULTS} more" if len(faults) > _FAULTS else ""
        raise ConfigError(f"{where}: " + "; ".join(faults[:_FAULTS]) + more)
    return Translation(config, view.values(), tuple(_notes(view, config)))


# Reading: every key is known, and has a value of its type -----------------------------------------------------------

_ROWS: dict[str, list[DeepSpeedKey]] = {}
for _row in KEYS:
    _ROWS.setdefault(_row.path, []).append(_row)
_CHILDREN: dict[str, list[str]] = {}
for _row in KEYS:
    _parent, _, _name = _row.path.rpartition(".")
    _CHILDREN.setdefault(_parent, []).append(_name)
_TYPED = {"optimizer.params": "optimizer.type", "scheduler.params": "scheduler.type"}


def rows_of(path: str, kind: str | None = None) -> DeepSpeedKey | None:
    """The row of a path; of a type's own parameters, the row of type ``kind``."""
    for row in _ROWS.get(path, ()):
        if not row.of or kind in row.of:
            return row
    return None


class _Reading:
    """What a file gives, by path, with what is wrong in it."""

    def __init__(self, auto: Mapping[str, Any]) -> None:
        self.auto = auto
        self.found: dict[str, Any] = {}
        self.rows: dict[str, DeepSpeedKey] = {}
        self.said: dict[str, Any] = {}
        self.kinds: dict[str, str | None] = {}
        self.faults: list[str] = []

    def read(self, given: Mapping[str, Any]) -> None:
        """Take in a whole configuration."""
        for path, own in (("optimizer", "optimizer.params"), ("scheduler", "scheduler.params")):
            inner = given.get(path)
            word = inner.get("type") if isinstance(inner, Mapping) else None
            self.kinds[own] = type_word(path, word) if isinstance(word, str) else None
        self._block("", given)

    def _block(self, path: str, given: Mapping[str, Any], place: str | None = None) -> None:
        place = path if place is None else place
        for key, value in given.items():
            row = self._row(path, str(key), place)
            if row is not None:
                self._take(row, f"{place}.{key}".lstrip("."), value)

    def _row(self, path: str, key: str, place: str) -> DeepSpeedKey | None:
        kind = self.kinds.get(path)
        row = rows_of(f"{path}.{key}".lstrip("."), kind) or rows_of(f"{path}.NAME", kind)
        if row is None and not (path in _TYPED and kind not in _known_types(path)):
            self.faults.append(self._unknown(path, key, place))
        return row

    def _unknown(self, path: str, key: str, place: str) -> str:
        kind = self.kinds.get(path)
        prefix = f"{path}." if path else ""
        known = [
            name for name in _CHILDREN.get(path, ()) if rows_of(prefix + name, kind) and name.isidentifier()
        ]
        hint = nearest(key, known)
        elsewhere = [row for row in KEYS if row.path.rpartition(".")[2] == key]
        if "did you mean" not in hint and elsewhere:
            home = ", ".join(elsewhere[0].of) or elsewhere[0].path.rpartition(".")[0] or "the top level"
            hint = f"; it belongs to {home}"
        return f"{place or '(top level)'}: unknown key {key!r:.100}{hint}"

    def _take(self, row: DeepSpeedKey, place: str, value: Any) -> None:
        self.said[place] = value
        path = row.stands_for or row.path
        if row.stands_for:
            row = next(each for each in _ROWS[row.stands_for])
        if path in self.found and not path.endswith("NAME"):
            self.faults.append(f"{place}: {path} is given too, and both mean the same; keep {path}")
            return
        if value == "auto":
            value = self.auto.get(path, None if row.default == REQUIRED else row.default)
            if path in _AUTO_IS_NONE and path not in self.auto:
                self.rows[place], self.found[path] = row, None
                return
            if value is None:
                self.rows[place] = row
                return
        if path == "zero_optimization" and isinstance(value, bool):
            value = {"stage": int(value)}
        fault = _fault(row.kind, value)
        if fault:
            self.faults.append(f"{place}: {fault} (given {_shown(value)})")
            return
        self.rows[place] = row
        value = _in_words_of(row.kind, value)
        if isinstance(value, Mapping) and row.kind.startswith("block"):
            self.found[path] = {}
            self._block(path, value, place if "NAME" in path or "[]" in path else path)
        elif isinstance(value, list) and f"{path}.[]" in _LISTS:
            self.found[path] = value
            for number, item in enumerate(value):
                if isinstance(item, Mapping):
                    self._block(f"{path}.[]", item, f"{place}.{number}")
                else:
                    self.faults.append(f"{place}.{number}: expected keys and values (given {_shown(item)})")
        else:
            self.found[path] = value


_AUTO_IS_NONE = ("scheduler.params.warmup_max_lr",)
"""What "auto" leaves to other keys, and not to the default: the learning rate of the optimizer."""

_LISTS = {row.path.partition(".[]")[0] + ".[]" for row in KEYS if ".[]" in row.path}


def _known_types(path: str) -> set[str]:
    return {kind for row in KEYS if row.path.startswith(f"{path}.") for kind in row.of}


def type_word(block: str, word: str) -> str:
    """A type of optimizer as the table writes it; those of schedulers are case-sensitive, as there."""
    if block == "scheduler":
        return word
    known = _known_types(f"{block}.params")
    return next((kind for kind in known if kind.lower() == word.lower()), word)


_DTYPES = {"float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"}
"""Words for dtypes, in ours; ``torch.`` may stand before them."""


def _in_words_of(kind: str, value: Any) -> Any:
    """A word that may be written in several ways, as the table writes it."""
    if not isinstance(value, str):
        return value
    if kind.startswith("dtype"):
        word = value.lower().removeprefix("torch.")
        return _DTYPES.get(word, word)
    if kind.startswith("one of "):
        return next(
            w for w in kind.removesuffix("?").removeprefix("one of ").split("|") if w.lower() == value.lower()
        )
    return value


_TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "bool": ("true or false", lambda v: isinstance(v, bool) or v in (0, 1)),
    "int": ("an integer", lambda v: _is_number(v) and float(v).is_integer()),
    "num": ("a number", lambda v: _is_number(v)),
    "text": ("text", lambda v: isinstance(v, str)),
    "list": ("a list", lambda v: isinstance(v, list)),
    "texts": ("a list of text", lambda v: isinstance(v, list) and all(isinstance(each, str) for each in v)),
    "numbers": ("a list of numbers", lambda v: isinstance(v, list | tuple) and all(map(_is_number, v))),
    "rates": ("a number >= 0 or a list of them", lambda v: all(_is_number(n) and n >= 0 for n in _many(v))),
    "count": (
        "an integer > 0, or inf",
        lambda v: v == math.inf or (_is_number(v) and v > 0 and float(v).is_integer()),
    ),
    "block": ("keys and values", lambda v: isinstance(v, Mapping)),
    "dtype": (
        "fp32, fp16 or bf16",
        lambda v: isinstance(v, str) and _in_words_of("dtype", v) in _DTYPES.values(),
    ),
    "any": ("", lambda v: True),
}


def _fault(kind: str, value: Any) -> str:
    """What is wrong with a value of that kind; empty if nothing."""
    may_be_null, kind = kind.endswith("?"), kind.removesuffix("?")
    if value is None and may_be_null:
        return ""
    if kind.startswith("one of "):
        words = kind.removeprefix("one of ").split("|")
        is_known = isinstance(value, str) and value.lower() in [word.lower() for word in words]
        return "" if is_known else f"expected one of {', '.join(words)}"
    word, *bounds = kind.split()
    said, holds = _TYPES[word]
    if not holds(value):
        return f"expected {said}" + (" or null" if may_be_null else "")
    for sign, limit in zip(bounds[::2], map(float, bounds[1::2]), strict=True):
        holds_bound = {">": value > limit, ">=": value >= limit, "<": value < limit, "<=": value <= limit}
        if not holds_bound[sign]:
            return f"expected {said} {sign} {limit:g}"
    return ""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _many(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _shown(value: Any, place: str = "") -> str:
    if place.endswith("api_key"):
        return '"..."'
    if isinstance(value, Mapping) and "api_key" in value:
        value = {**value, "api_key": "..."}
    text = json.dumps(value, default=str)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


# The values, with their defaults ------------------------------------------------------------------------------------


class _View:
    """The values of a reading; what is refused among them is a fault."""

    def __init__(self, reading: _Reading) -> None:
        self._reading = reading
        self.faults: list[str] = []
        self.off = {row.path for rows in _ROWS.values() for row in rows if self._is_off(row)}
        for row in KEYS:
            if row.default == REQUIRED and row.fate == "does" and self._is_missing(row):
                self.faults.append(f"{row.path} is missing; it has no default")
        for place, row in reading.rows.items():
            if row.fate == "refused" and self._asks(row, reading.said[place]):
                self.refuse(place, reading.said[place], row.said)

    def __call__(self, path: str) -> Any:
        """The value of a key: given, or its default; None of a required key that is left out."""
        found = self._reading.found
        if path in found:
            return found[path]
        row = rows_of(path, self._reading.kinds.get(path.rpartition(".")[0]))
        return None if row is None or row.default == REQUIRED else row.default

    def given(self, path: str) -> bool:
        """True where the file says it."""
        return path in self._reading.found

    def does(self, name: str, kind: str) -> bool:
        """True of a parameter that optimizers of type ``kind`` act by."""
        row = rows_of(f"optimizer.params.{name}", kind)
        return row is not None and row.fate == "does"

    def parameters(self, path: str) -> Mapping[str, Any]:
        """What a block holds, as it was given."""
        found = self._reading.said.get(path)
        return found if isinstance(found, Mapping) else {}

    def refuse(self, place: str, value: Any, instead: str) -> None:
        """Note a fault."""
        self.faults.append(f"{place}: {_shown(value, place)} is not taken here; instead: {instead}")

    def places(self) -> Iterable[tuple[str, DeepSpeedKey, Any]]:
        """Place, row and value of everything that was given, blocks with keys left out."""
        for place, row in self._reading.rows.items():
            value = self._reading.said[place]
            if not (isinstance(value, Mapping) and value):
                yield place, row, value

    def values(self) -> dict[str, Any]:
        """Every value by path, without blocks and what has names of the user's."""
        known = [path for path in _ROWS if "NAME" not in path and "[]" not in path]
        kept = (p for p in known if not _ROWS[p][0].kind.startswith("block") and not _ROWS[p][0].stands_for)
        return {path: self(path) for path in kept}

    def _is_off(self, row: DeepSpeedKey) -> bool:
        """True of a block that does not act: ``enabled`` is false in it, or it is empty."""
        if not row.kind.startswith("block"):
            return False
        switch = f"{row.path}.enabled"
        if switch in _ROWS:
            return not (self.given(row.path) and self(switch))
        inner = (self(path) for path in self._reading.found if path.startswith(f"{row.path}."))
        return not any(value is not None for value in inner)

    def _is_missing(self, row: DeepSpeedKey) -> bool:
        block = row.path.rpartition(".")[0]
        is_wanted = not row.of or self._reading.kinds.get(block) in row.of
        return is_wanted and self.given(block.partition(".")[0]) and row.path not in self._reading.said

    def _asks(self, row: DeepSpeedKey, value: Any) -> bool:
        """True where a key that is refused asks for something."""
        block = row.path.rpartition(".")[0]
        if block and any(each.fate == "refused" for each in _ROWS.get(block, ())):
            return False  # the block is refused as one
        if row.kind.startswith("block"):
            return row.path not in self.off and value not in ({}, None)
        is_off = (
            value == row.default
            or value is None
            or value == "auto"
            or (value is False and row.default is not True)
        )
        return block not in self.off and not is_off


# Our blocks ---------------------------------------------------------------------------------------------------------


def _some(**keys: Any) -> dict[str, Any]:
    """The keys that have a value."""
    return {key: value for key, value in keys.items() if value is not None}


def _number(value: Any) -> Any:
    """5e8 as an integer, where it is one."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _batch(v: _View) -> dict[str, Any]:
    sizes = _some(
        global_size=_number(v("train_batch_size")),
        micro_size=_number(v("train_micro_batch_size_per_gpu")),
        accumulation=_number(v("gradient_accumulation_steps")),
    )
    return {**sizes, "weigh_by": "batches"}


def _clip(v: _View) -> float | None:
    return v("gradient_clipping") or None


def _mesh(v: _View) -> dict[str, Any]:
    stages = v("pipeline.stages")
    if stages != "auto" and (not _is_number(stages) or stages < 1):
        v.refuse("pipeline.stages", stages, "auto, or a number of stages")
        stages = "auto"
    tp = max(v("tensor_parallel.autotp_size"), v("tensor_parallel.tp.tp_size"))
    return _some(
        pp=int(stages) if stages != "auto" and stages > 1 else None,
        tp=int(tp) if tp > 1 else None,
        dp=_data_parallel(v),
    )


def _data_parallel(v: _View) -> Any:
    shard = int(v("zero_optimization.mics_shard_size"))
    if shard > 0:
        if v("zero_optimization.stage") != 3:
            v.refuse("zero_optimization.mics_shard_size", shard, "stage: 3 beside it, or leave it out")
        return {"replicate": "auto", "shard": shard}
    return _number(v("data_parallel_size"))


def _zero(v: _View) -> dict[str, Any]:
    ahead = v("zero_optimization.stage3_prefetch_bucket_size")
    return _some(stage=int(v("zero_optimization.stage")), prefetch_units=0 if ahead == 0 else None)


def _offload(v: _View) -> dict[str, Any]:
    found = {}
    for ours, block, old in (
        ("optimizer", "zero_optimization.offload_optimizer", ("cpu_offload",)),
        ("parameters", "zero_optimization.offload_param", ("cpu_offload_param", "cpu_offload_params")),
    ):
        before = next((key for key in old if v(f"zero_optimization.{key}")), None)
        device = v(f"{block}.device") if v(block) is not None else "none"
        if before and v.given(block):
            v.refuse(f"zero_optimization.{before}", True, f"{block} alone, which says the same")
        if device == "nvme":
            v.refuse(f"{block}.device", device, "cpu")
        if before or device == "cpu":
            found[ours] = "host"
    return found


_HALVES = ("fp16", "bf16", "amp", "torch_autocast")
"""Blocks that each say in which dtypes to compute."""
_SAFE = ["torch.nn.Linear", "torch.nn.Conv1d", "torch.nn.Conv2d", "torch.nn.Conv3d"]
"""Modules whose gradients travel in 16 bits under torch_autocast, where none are named."""


def _precision(v: _View) -> dict[str, Any]:
    on = [name for name in _HALVES if v(f"{name}.enabled")]
    if len(on) > 1:
        v.refuse(f"{on[1]}.enabled", True, f"{' or '.join(on)} alone")
    half = on[0] if on else ""
    keep = v("data_types.keep_in_fp32_modules")
    if keep != "auto" and _fault("texts", keep):
        v.refuse("data_types.keep_in_fp32_modules", keep, 'a list of patterns, or "auto"')
        keep = "auto"
    return _some(
        **{"amp": _amp, "torch_autocast": _autocast}.get(half, _sixteen)(v, half),
        reduce=v("communication_data_type"),
        buffers=v("data_types.buffer_dtype"),
        keep_fp32=None if keep == "auto" else [f"*{pattern}*" for pattern in keep],
    )


def _sixteen(v: _View, half: str) -> dict[str, Any]:
    """``fp16``, ``bf16``, or neither."""
    compute = half or v("data_types.param_dtype")
    is_narrow = half and v(f"{half}.{half}_master_weights_and_grads")
    skips = (half == "bf16" and v("bf16.check_grad_overflow")) or (half == "fp16" and v("fp16.loss_scale"))
    return _some(
        compute=compute,
        grad=v("data_types.grad_accum_dtype") or (compute if is_narrow else None),
        master=compute if is_narrow else None,
        loss_scale=_loss_scale(v) if half == "fp16" else None,
        nonfinite="skip" if skips else None,
    )


def _loss_scale(v: _View) -> Any:
    if v("fp16.loss_scale"):
        return float(v("fp16.loss_scale"))
    return {
        "init_scale": 2.0 ** v("fp16.initial_scale_power"),
        "growth_interval": int(v("fp16.loss_scale_window")),
        "growth_delay": 1,
        "hysteresis": int(v("fp16.hysteresis")),
        "consecutive_hysteresis": bool(v("fp16.consecutive_hysteresis")),
        "min_scale": float(v("fp16.min_loss_scale")),
    }


def _amp(v: _View, half: str) -> dict[str, Any]:
    level, scale = v("amp.opt_level"), v("amp.loss_scale")
    if not (scale in (None, "dynamic") or (_is_number(scale) and scale > 0)):
        v.refuse("amp.loss_scale", scale, "dynamic, or a number above 0")
        return {}
    if level in ("O0", "O3"):
        if scale not in (None, 1):
            v.refuse("amp.loss_scale", scale, f"opt_level: O1 or O2; {level} has none")
        return {"amp": level}
    follows = _some(growth_interval=2000, hysteresis=1, min_scale=v("amp.min_loss_scale"))
    return {"amp": level, "loss_scale": float(scale) if _is_number(scale) else follows}


def _autocast(v: _View, half: str) -> dict[str, Any]:
    dtype = v("torch_autocast.dtype") or "bf16"
    if dtype == "fp32":
        v.refuse("torch_autocast.dtype", dtype, "bf16 or fp16")
    safe = v("torch_autocast.lower_precision_safe_modules")
    classes = _SAFE if safe is None else safe
    return {
        "operations": dtype,
        "narrow_reduce": [f"class:{name.rpartition('.')[2]}" for name in classes],
        "loss_scale": {"growth_interval": 2000, "hysteresis": 1} if dtype == "fp16" else None,
    }


_OPTIMIZER_TYPES = (
    *("Adam", "AdamW", "Lamb", "Lion", "Adagrad", "Muon"),
    *("SGD", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop"),
)
_PASSED_ON = (
    *(
        "weight_decay",
        "betas",
        "eps",
        "amsgrad",
        "momentum",
        "nesterov",
        "dampening",
        "alpha",
        "centered",
        "lr_decay",
    ),
    *("initial_accumulator_value", "rho", "momentum_decay", "decoupled_weight_decay", "lambd", "t0", "etas"),
    "step_sizes",
)
"""Parameters that mean the same here."""


def _optimizer(v: _View) -> dict[str, Any] | None:
    word = v("optimizer.type") if v("optimizer") is not None else None
    if word is None:
        return None
    kind = str(word).lower()
    if kind not in [known.lower() for known in _OPTIMIZER_TYPES]:
        v.refuse(
            "optimizer.type", word, f"one of {', '.join(_OPTIMIZER_TYPES)}, or an optimizer object of torch's"
        )
        return None

    def of(name: str) -> Any:
        return v(f"optimizer.params.{name}")

    made = _some(
        type=kind, lr=float(of("lr")), **{name: of(name) for name in _PASSED_ON if v.does(name, kind)}
    )
    if kind == "adam" and of("adam_w_mode"):
        made["type"] = "adamw"
    if made["type"] == "adamw" and of("torch_adam") and not v.given("optimizer.params.weight_decay"):
        made["weight_decay"] = 0.01
    if kind == "lamb":
        made["trust_bounds"] = [of("min_coeff"), of("max_coeff")]
        made["correct"] = "step" if of("bias_correction") else "none"
    if kind == "muon":
        made |= _muon(v)
    return made


def _muon(v: _View) -> dict[str, Any]:
    """Muon for everything of two dims but embeddings and heads, by their names, as there."""
    lr, of_matrices, of_rest = (v(f"optimizer.params.{name}") for name in ("lr", "muon_lr", "adam_lr"))
    embeddings = "|".join(
        "*" + "".join(f"[{c}{c.upper()}]" if c.isalpha() else c for c in w) + "*" for w in _NO_MATRIX
    )
    return {
        "lr": float(lr if of_matrices is None else of_matrices),
        "rest_lr": float(of_rest if of_rest is not None else lr if v.given("optimizer.params.lr") else 1e-3),
        "adjust_lr_fn": "original",
        "groups": [{"match": embeddings, "matrices": False}, {"match": "*", "matrices": True}],
    }


_NO_MATRIX = ("embed", "lm_head")
"""Parts of names whose weights Muon leaves to Adam."""

_SCHEDULES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "LRRangeTest": (
        "range_test",
        {
            "min_lr": "lr_range_test_min_lr",
            "interval_steps": "lr_range_test_step_size",
            "rate": "lr_range_test_step_rate",
            "staircase": "lr_range_test_staircase",
        },
    ),
    "OneCycle": (
        "one_cycle",
        {
            "min_lr": "cycle_min_lr",
            "max_lr": "cycle_max_lr",
            "rise_steps": "cycle_first_step_size",
            "fall_steps": "cycle_second_step_size",
            "rise_stairs": "cycle_first_stair_count",
            "fall_stairs": "cycle_second_stair_count",
            "decay_steps": "decay_step_size",
            "decay_lr_rate": "decay_lr_rate",
            "cycle_momentum": "cycle_momentum",
            "min_momentum": "cycle_min_mom",
            "max_momentum": "cycle_max_mom",
            "decay_momentum_rate": "decay_mom_rate",
        },
    ),
    "WarmupLR": (
        "warmup",
        {
            "min_lr": "warmup_min_lr",
            "max_lr": "warmup_max_lr",
            "warmup_steps": "warmup_num_steps",
            "rise": "warmup_type",
        },
    ),
    "WarmupDecayLR": (
        "warmup_linear",
        {
            "min_lr": "warmup_min_lr",
            "max_lr": "warmup_max_lr",
            "warmup_steps": "warmup_num_steps",
            "rise": "warmup_type",
            "total_steps": "total_num_steps",
        },
    ),
    "WarmupCosineLR": (
        "warmup_cosine",
        {
            "warmup_steps": "warmup_num_steps",
            "rise": "warmup_type",
            "start_ratio": "warmup_min_ratio",
            "min_ratio": "cos_min_ratio",
            "total_steps": "total_num_steps",
        },
    ),
}
"""Their schedulers as types of ours, and our keys of each by theirs."""


def _schedule(v: _View) -> dict[str, Any] | None:
    word = v("scheduler.type") if v("scheduler") is not None else None
    if word is None:
        return None
    if word not in _SCHEDULES:
        if not hasattr(lr_scheduler, word):
            known = nearest(word, [*_SCHEDULES, *(name for name in dir(lr_scheduler) if name.endswith("LR"))])
            v.refuse("scheduler.type", word, f"one of {', '.join(_SCHEDULES)}, or of torch{known}")
            return None
        return {"type": "torch", "scheduler": word, "arguments": dict(v.parameters("scheduler.params"))}
    kind, keys = _SCHEDULES[word]
    made = {ours: _number(v(f"scheduler.params.{theirs}")) for ours, theirs in keys.items()}
    if kind == "one_cycle":
        made["second_beta"] = 0.99
        has_betas = v("optimizer") is None or v("optimizer.params.betas") is not None
        made["cycle_momentum"] = bool(made["cycle_momentum"] and has_betas)
        if not made["decay_steps"]:  # their decay is off then, whatever its rates
            del made["decay_lr_rate"], made["decay_momentum_rate"]
    return {"type": kind, **_some(**made)}


_RECOMPUTES = (
    "activation_checkpointing.partition_activations",
    "activation_checkpointing.cpu_checkpointing",
    "activation_checkpointing.contiguous_memory_optimization",
    "activation_checkpointing.number_checkpoints",
    "pipeline.activation_checkpoint_interval",
)


def _recompute(v: _View) -> dict[str, Any]:
    return {"scope": "full"} if any(v(path) for path in _RECOMPUTES) else {}


def _pipeline(v: _View) -> dict[str, Any]:
    word = v("pipeline.partition")
    known = {"best": "parameters", "parameters": "parameters", "uniform": "uniform"}
    if word.lower().startswith("type:"):
        return {"partition": f"type:{word[5:]}"}
    if word.lower() not in known:
        v.refuse("pipeline.partition", word, f"one of {', '.join(known)}, type:REGEX")
        return {}
    return {"partition": known[word.lower()]} if v.given("pipeline.partition") else {}


def _compile(v: _View) -> dict[str, Any]:
    return {"scope": "blocks"} if v("compile.deepcompile") else {}


def _checkpoint(v: _View) -> dict[str, Any]:
    return {"asynchronous": bool(v("checkpoint.writer.decoupled"))}


_TAGS = {
    "loss": "Train/Samples/train_loss",
    "lr": "Train/Samples/lr",
    "loss_scale": "Train/Samples/loss_scale",
}
"""Their names of our columns."""


def _monitor(v: _View) -> dict[str, Any]:
    every = v("steps_per_print")
    made = _some(
        tensorboard=_folder(v, "tensorboard"),
        csv=_folder(v, "csv_monitor"),
        print_every=int(every) if every not in (None, math.inf) else None,
        breakdown=True if v("wall_clock_breakdown") else None,
    )
    if v("wandb.enabled"):
        made |= _some(wandb=v("wandb.project"), wandb_group=v("wandb.group"), wandb_team=v("wandb.team"))
    if v("comet.enabled"):
        if v("comet.project") is None:
            v.refuse("comet.project", None, "the name of a project")
        places = {"comet": "project", "comet_workspace": "workspace", "comet_experiment": "experiment_name"}
        made |= _some(**{ours: v(f"comet.{theirs}") for ours, theirs in places.items()})
    if {"tensorboard", "wandb", "comet"} & {*made}:
        made["tags"] = dict(_TAGS)
        if v("train_batch_size") is not None or v("train_micro_batch_size_per_gpu") is not None:
            made["axis"] = "samples"
    return made


def _folder(v: _View, name: str) -> str | None:
    if not v(f"{name}.enabled"):
        return None
    return posixpath.join(v(f"{name}.output_path"), v(f"{name}.job_name")) or "."


def _module_profile(v: _View) -> dict[str, Any]:
    if not v("flops_profiler.enabled"):
        return {}
    depth = int(v("flops_profiler.module_depth"))
    return _some(
        step=int(v("flops_profiler.profile_step")),
        depth=None if depth < 0 else max(depth, 1),
        top=int(v("flops_profiler.top_modules")),
        tree=bool(v("flops_profiler.detailed")),
        output=v("flops_profiler.output_file"),
    )


_BLOCKS: Mapping[str, Callable[[_View], Any]] = {
    "mesh": _mesh,
    "zero": _zero,
    "offload": _offload,
    "pipeline": _pipeline,
    "recompute": _recompute,
    "batch": _batch,
    "precision": _precision,
    "optimizer": _optimizer,
    "schedule": _schedule,
    "max_grad_norm": _clip,
    "compile": _compile,
    "checkpoint": _checkpoint,
    "monitor": _monitor,
    "module_profile": _module_profile,
}


# Notes --------------------------------------------------------------------------------------------------------------

_DEFAULTS = {
    "gradient_clipping": "max_grad_norm",
    "checkpoint.writer.decoupled": "checkpoint.asynchronous",
}
"""Keys whose default of theirs is not ours."""


def _notes(v: _View, config: Mapping[str, Any]) -> Iterable[Note]:
    for place, row, value in v.places():
        off = next((path for path in _outer(row.path) if path in v.off and f"{path}.enabled" in _ROWS), None)
        if off is not None and not row.path.endswith(".enabled"):
            yield Note(place, value, "idle", f"{off}.enabled is false")
        elif row.fate == "does" and (value != row.default or row.default is not False):
            yield Note(place, value, "does", _ours(row, config))
        else:
            yield Note(place, value, "idle", row.said if row.fate == "idle" else "it asks for nothing")
    for path, ours in _DEFAULTS.items():
        if not v.given(path):
            yield Note(path, v(path), "default", f"{ours}: {_shown(_at(config, ours))}")
    yield Note("(loss)", "mean", "default", "batch.weigh_by: batches, so every microbatch weighs the same")


def _outer(path: str) -> Sequence[str]:
    parts = path.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts))]


def _ours(row: DeepSpeedKey, config: Mapping[str, Any]) -> str:
    """Our key with its value, where the row names one."""
    path = row.said.partition(":")[0].partition(";")[0].partition(",")[0].strip()
    found = _at(config, path)
    return row.said if found is None else f"{path}: {_shown(found)}"


def _at(config: Mapping[str, Any], path: str) -> Any:
    found: Any = config
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found
