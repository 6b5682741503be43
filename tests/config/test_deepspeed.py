"""DeepSpeed configurations: every key has an answer, every mistake one too, and what acts changes something."""

import base64
import json
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args

import pytest

from shardwise.base.errors import ConfigError
from shardwise.config.auto import resolve
from shardwise.config.deepspeed import translate
from shardwise.config.deepspeed_keys import KEYS, REQUIRED, ROWS_FILE, DeepSpeedKey, Fate
from shardwise.config.deepspeed_kinds import fault_of
from shardwise.config.deepspeed_values import row_of
from shardwise.config.run import RunConfig, load


def test_rows_of_the_file_are_well_formed() -> None:
    paths = {row.path for row in KEYS}
    places = [(row.path, kind) for row in KEYS for kind in row.of or ("",)]
    assert len(set(places)) == len(places), "two rows for one key"
    for row in KEYS:
        parent, _, name = row.path.rpartition(".")
        assert row.fate in get_args(Fate) and row.said and not row.said.startswith("$"), row
        assert name and (not parent or parent.removesuffix(".[]") in paths), row
        assert row.default in (None, REQUIRED) or not fault_of(row.kind, row.default), row
        assert not row.stands_for or row.stands_for in paths, row
    text = ROWS_FILE.read_text()
    for sentence in json.loads(text)["sentences"]:
        assert text.count(f'"${sentence}"') > 1, sentence
    assert ROWS_FILE.name in {path.name for path in files("shardwise.config").iterdir()}


def nested(path: str, value: Any) -> dict[str, Any]:
    """``{"a": {"b": value}}`` of ``a.b``, with the type beside parameters that belong to one."""
    for name in reversed(path.split(".")):
        value = [value] if name == "[]" else {("metric" if name == "NAME" else name): value}
    return value


ADAM = {"optimizer": {"type": "Adam"}}
FP16 = {"fp16": {"enabled": True}}
BF16 = {"bf16": {"enabled": True}}
AMP = {"amp": {"enabled": True}}
AUTOCAST = {"torch_autocast": {"enabled": True}}
EXPERTS = {"expert_parallel": {"enabled": True, "autoep_size": 2}}
COMET = {"comet": {"enabled": True, "project": "a"}}
PROFILER = {"flops_profiler": {"enabled": True}}
STAGE_3 = {"zero_optimization": {"stage": 3}}
NVME = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/a"}}}
NVME_WEIGHTS = {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/a"}}}
CHANGES: dict[str, tuple[dict[str, Any], Any]] = {
    "train_batch_size": ({}, 64),
    "train_micro_batch_size_per_gpu": ({}, 4),
    "gradient_accumulation_steps": ({"train_batch_size": 64}, 4),
    "gradient_clipping": ({}, 0),
    "optimizer.type": (ADAM, "SGD"),
    "fp16.enabled": ({}, True),
    "fp16.loss_scale": (FP16, 128),
    "fp16.consecutive_hysteresis": (FP16, True),
    "bf16.check_grad_overflow": (BF16, False),
    "amp.enabled": ({}, True),
    "amp.opt_level": (AMP, "O2"),
    "amp.loss_scale": (AMP, 256),
    "amp.min_loss_scale": (AMP, 2),
    "torch_autocast.enabled": ({}, True),
    "torch_autocast.dtype": (AUTOCAST, "float16"),
    "torch_autocast.lower_precision_safe_modules": (AUTOCAST, ["torch.nn.Linear"]),
    "data_types.buffer_dtype": (BF16, "bf16"),
    "scheduler.type": ({"scheduler": {"type": "WarmupLR"}}, "LRRangeTest"),
    "fp16.initial_scale_power": (FP16, 8),
    "fp16.loss_scale_window": (FP16, 10),
    "fp16.hysteresis": (FP16, 1),
    "fp16.min_loss_scale": (FP16, 4),
    "fp16.fp16_master_weights_and_grads": (FP16, True),
    "bf16.enabled": ({}, True),
    "bf16.bf16_master_weights_and_grads": (BF16, True),
    "data_types.grad_accum_dtype": (BF16, "torch.bfloat16"),
    "data_types.param_dtype": ({}, "half"),
    "data_types.keep_in_fp32_modules": (BF16, ["norm"]),
    "communication_data_type": (BF16, "bf16"),
    "zero_optimization.stage": ({}, 3),
    "zero_optimization.offload_param.device": (STAGE_3, "cpu"),
    "zero_optimization.offload_optimizer.device": (STAGE_3, "cpu"),
    "zero_optimization.offload_param.nvme_path": (NVME_WEIGHTS, "/b"),
    "zero_optimization.offload_optimizer.nvme_path": (NVME, "/b"),
    "zero_optimization.offload_optimizer.buffer_count": (NVME, 12),
    "zero_optimization.offload_optimizer.ratio": (NVME, 0.25),
    "zero_optimization.cpu_offload": (STAGE_3, True),
    "zero_optimization.cpu_offload_param": (STAGE_3, True),
    "zero_optimization.cpu_offload_params": (STAGE_3, True),
    "zero_optimization.stage3_prefetch_bucket_size": (STAGE_3, 0),
    "zero_optimization.overlap_comm": (STAGE_3, False),
    "zero_optimization.mics_shard_size": (STAGE_3, 2),
    "activation_checkpointing.partition_activations": ({}, True),
    "activation_checkpointing.cpu_checkpointing": ({}, True),
    "activation_checkpointing.contiguous_memory_optimization": ({}, True),
    "activation_checkpointing.number_checkpoints": ({}, 4),
    "pipeline.stages": ({}, 2),
    "pipeline.partition": ({}, "uniform"),
    "pipeline.activation_checkpoint_interval": ({}, 1),
    "tensor_parallel.autotp_size": ({}, 2),
    "tensor_parallel.tp.tp_size": ({}, 2),
    "expert_parallel.enabled": ({"expert_parallel": {"autoep_size": 2}}, True),
    "expert_parallel.autoep_size": (EXPERTS, 4),
    "expert_parallel.expert_tensor_parallel_size": (EXPERTS, 2),
    "sequence_parallel_size": ({}, 2),
    "data_parallel_size": ({"tensor_parallel": {"autotp_size": 4}}, 2),
    "compile.deepcompile": ({}, True),
    "compile.offload_activation": ({"compile": {"deepcompile": True}}, True),
    "checkpoint.writer.decoupled": ({}, True),
    "steps_per_print": ({}, 10),
    "wall_clock_breakdown": ({}, True),
    "tensorboard.enabled": ({}, True),
    "tensorboard.output_path": ({"tensorboard": {"enabled": True}}, "logs"),
    "tensorboard.job_name": ({"tensorboard": {"enabled": True}}, "mine"),
    "csv_monitor.enabled": ({}, True),
    "csv_monitor.output_path": ({"csv_monitor": {"enabled": True}}, "logs"),
    "csv_monitor.job_name": ({"csv_monitor": {"enabled": True}}, "mine"),
    "wandb.enabled": ({}, True),
    "wandb.group": ({"wandb": {"enabled": True}}, "a"),
    "wandb.team": ({"wandb": {"enabled": True}}, "a"),
    "wandb.project": ({"wandb": {"enabled": True}}, "a"),
    "comet.enabled": ({"comet": {"project": "a"}}, True),
    "comet.project": (COMET, "b"),
    "comet.workspace": (COMET, "b"),
    "comet.experiment_name": (COMET, "b"),
    "flops_profiler.enabled": ({}, True),
    "flops_profiler.profile_step": (PROFILER, 5),
    "flops_profiler.module_depth": (PROFILER, 2),
    "flops_profiler.top_modules": (PROFILER, 3),
    "flops_profiler.detailed": (PROFILER, False),
    "flops_profiler.output_file": (PROFILER, "flops.txt"),
}
"""Of each key that acts: what stands beside it, and a value that is not its default."""


ELSEWHERE = {
    "dataloader_drop_last": "tests/deepspeed/training/test_loader.py",
    "dump_state": "tests/deepspeed/test_neighbours.py",
}
"""Keys that act in shardwise.deepspeed, and where that is tested."""


def set_in(given: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """``given`` with a value at ``path``."""
    name, _, rest = path.partition(".")
    return {**given, name: set_in(given.get(name, {}), rest, value) if rest else value}


def test_every_key_that_acts_is_in_the_table() -> None:
    acts = {row.path for row in KEYS if row.fate == "does" and not row.stands_for and "block" not in row.kind}
    assert {path for path in acts if ".params." not in path} == {*CHANGES, *ELSEWHERE}


OF_TYPES = [(row, kind) for row in KEYS if row.fate == "does" for kind in row.of]
OTHERS: dict[str, Any] = {
    "betas": [0.5, 0.6],
    "etas": [0.4, 1.3],
    "step_sizes": [1e-5, 40],
    "decay_lr_rate": 0.5,
    "rho": 0.5,
    "total_num_steps": 7,
}
"""Values that are valid and not the default, where ``other_value`` has none."""
BESIDE: dict[str, dict[str, Any]] = {
    "nesterov": {"momentum": 0.9},
    "decay_lr_rate": {"decay_step_size": 5},
    "decay_mom_rate": {"decay_step_size": 5},
    "cycle_second_stair_count": {"cycle_first_stair_count": 5},
}


@pytest.mark.parametrize(("row", "kind"), OF_TYPES, ids=[f"{kind}-{row.path}" for row, kind in OF_TYPES])
def test_a_parameter_that_acts_changes_the_run(row: DeepSpeedKey, kind: str) -> None:
    block, _, name = row.path.rpartition(".params.")
    required = {
        each.path.rpartition(".")[2]: 3 for each in KEYS if kind in each.of and each.default == REQUIRED
    }
    given = {block: {"type": kind, "params": {**required, **BESIDE.get(name, {})}}}
    if kind.startswith(("onebit", "zeroone")):
        with pytest.raises(ConfigError, match="optimizer.type"):
            translate(given)
    elif (kind, name) != ("adamw", "adam_w_mode"):  # which is AdamW whatever it says
        assert parsed(given) != parsed(set_in(given, row.path, OTHERS.get(name, other_value(row))))


@pytest.mark.parametrize(
    ("beside", "bytes_each"),
    [
        ({}, 4),
        (BF16, 2),
        (FP16, 2),
        (AUTOCAST, 4),
        ({"amp": {"enabled": True, "opt_level": "O2"}}, 2),
        ({"amp": {"enabled": True, "opt_level": "O1"}}, 4),
        ({"data_types": {"param_dtype": "half"}}, 2),
    ],
)
def test_what_is_gathered_ahead_is_told_in_bytes(beside: dict[str, Any], bytes_each: int) -> None:
    for given, wanted in ((1000, 1000 * bytes_each), (0, 0), (50_000_000, "auto")):
        zero = {"stage": 3, "stage3_prefetch_bucket_size": given}
        assert parsed({**beside, "zero_optimization": zero}).zero.prefetch_bytes == wanted


@pytest.mark.parametrize("path", CHANGES)
def test_what_acts_changes_the_run(path: str) -> None:
    beside, value = CHANGES[path]
    before, after = (parsed(given) for given in (beside, set_in(beside, path, value)))
    assert before != after


def parsed(given: dict[str, Any]) -> RunConfig:
    """What becomes of it, which eight ranks can do."""
    config = RunConfig.parse(translate(given).config)
    resolve(config, 8, "cpu")
    return config


@pytest.mark.parametrize("row", [row for row in KEYS if row.stands_for], ids=lambda row: row.path)
def test_an_old_name_says_the_same(row: DeepSpeedKey) -> None:
    new = row_of(row.stands_for)
    assert new is not None
    value = {"block": {}, "bool": not new.default}.get(row.kind, 7)
    both = set_in(set_in({}, row.path, value), new.path, value)
    with pytest.raises(ConfigError, match=f"{new.path} is given too, and both mean the same"):
        translate(both)
    if new.fate == "refused":
        with pytest.raises(ConfigError, match=f"{row.path}: true is not taken here"):
            translate(set_in({}, row.path, value))
    else:
        old, now = (translate(set_in({}, path, value)) for path in (row.path, new.path))
        assert (old.config, old.values) == (now.config, now.values)


def test_everything_at_its_default_asks_for_nothing() -> None:
    """What is refused is refused where it asks for something; blocks that act by being there are left out."""
    acting = ("optimizer", "scheduler", "zenflow", "zeropp", "partition_config", "sparse_att", "weight_quant")
    given: dict[str, Any] = {}
    for row in KEYS:
        plain = row.default != REQUIRED and not row.stands_for and not row.kind.startswith("block")
        if plain and not {"NAME", "[]"} & set(row.path.split(".")) and not any(w in row.path for w in acting):
            given = set_in(given, row.path, row.default)
    assert parsed(given) == parsed({})
    assert {note.fate for note in translate(given).notes} == {"does", "idle", "default"}


def test_whatever_is_refused_says_where_and_what_to_do() -> None:
    """Alone, and as a block that is switched on; 400 keys of one kind are one test."""
    for row in KEYS:
        if row.fate != "refused" or row.of or row.stands_for or row.said == "belongs to its block":
            continue
        value: Any = not row.default
        if row.kind.startswith("block"):
            inner = next((each for each in KEYS if each.path == f"{row.path}.enabled"), None)
            first = next(each for each in KEYS if each.path.startswith(f"{row.path}."))
            value = {"enabled": True} if inner else {first.path.rpartition(".")[2]: other_value(first)}
        elif row.kind != "bool":
            value = other_value(row)
        given = nested(row.path, value)
        if row.path.startswith("optimizer."):
            given = set_in(given, "optimizer.type", "AdamW")
        if (switch := f"{row.path.partition('.')[0]}.enabled") in {each.path for each in KEYS}:
            given = set_in(given, switch, True)
        with pytest.raises(ConfigError) as caught:
            translate(given)
        assert f"{row.path}: " in str(caught.value) and row.said in str(caught.value), row.path


def other_value(row: DeepSpeedKey) -> Any:
    """A value of its kind that is not its default."""
    kind = row.kind.removesuffix("?")
    if kind.startswith("one of "):
        return next(w for w in kind.removeprefix("one of ").split("|") if w != row.default)
    if kind == "rates":
        return 0.25
    by_kind = {
        "bool": not row.default,
        "texts": ["x"],
        "numbers": [3],
        "list": [],
        "dtype": "bf16",
        "any": "x",
        "text": "x",
    }
    return by_kind[kind] if kind in by_kind else 0.5 if kind.startswith("num") else 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"train_batch_size": "many"}, 'train_batch_size: expected an integer or null .given "many".'),
        ({"train_batch_size": 0}, "train_batch_size: expected an integer > 0"),
        ({"train_batch_size": True}, "train_batch_size: expected an integer"),
        ({"train_batch_size": 2.5}, "train_batch_size: expected an integer"),
        ({"gradient_clipping": -1}, "gradient_clipping: expected a number >= 0"),
        ({"gradient_clipping": float("nan")}, "gradient_clipping: expected a number"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage: expected an integer <= 3 .given 4."),
        ({"zero_optimization": 2}, "zero_optimization: expected keys and values .given 2."),
        ({"fp16": {"enabled": "yes"}}, "fp16.enabled: expected true or false"),
        ({"fp16": True}, "fp16: expected keys and values"),
        ({"fp16": {"enabled": 1}, "bf16": {"enabled": 1}}, "bf16.enabled: .*fp16 or bf16 alone"),
        (
            {"optimizer": {"type": "Adam", "params": {"betas": [0.9, "x"]}}},
            "params.betas: expected two numbers >= 0 < 1",
        ),
        ({"optimizer": {"type": "Adam", "params": {"momentum": 0.9}}}, "params: unknown key 'momentum'"),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"cycle_min_lr": 1}}},
            "'cycle_min_lr'; it belongs to OneCycle",
        ),
        ({"optimizer": {"params": {}}}, "optimizer.type is missing"),
        (
            {"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 3, "weight_decay": 0.1}}},
            '^config: optimizer.type: "OneBitAdam" is not taken here; instead: Adam or Lamb with [^;]*; no [^;]*$',
        ),
        ({"communication_data_type": "fp8"}, "communication_data_type: expected fp32, fp16 or bf16 or null"),
        (
            {"checkpoint": {"tag_validation": "Sometimes"}},
            "tag_validation: expected one of warn, ignore, fail",
        ),
        ({"zero_optimization": {"stage": 1, "mics_shard_size": 2}}, "mics_shard_size: .*stage: 3 beside it"),
        (
            {"zero_optimization": {"offload_param": {"device": "nvme"}}},
            "offload_param.nvme_path: null .*instead: a folder on that disk",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
            "offload_optimizer.nvme_path: null .*instead: a folder on that disk",
        ),
        (
            set_in(NVME, "zero_optimization.offload_param", {"device": "nvme", "nvme_path": "/b"}),
            "offload_param.nvme_path: \"/b\" .*one folder in both blocks; .*offload_optimizer.nvme_path is '/a'",
        ),
        (
            {
                "zero_optimization": {
                    "offload_optimizer": {"device": "cpu", "ratio": 0.5},
                    "cpu_offload_param": True,
                }
            },
            "offload_optimizer.ratio: 0.5 .*1.0 beside offload_param",
        ),
        ({"zero_optimization": {"cpu_offload": True, "offload_optimizer": {}}}, "offload_optimizer alone"),
        ({"scheduler": {"type": "OneCycle", "params": {}}}, "scheduler.params.cycle_min_lr is missing"),
        ({"scheduler": {"type": "WarmupLr"}}, "scheduler.type: .WarmupLr.*did you mean 'WarmupLR'"),
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {}}},
            "scheduler.params.total_num_steps is missing",
        ),
        (
            {"fp16": {"enabled": True}, "torch_autocast": {"enabled": True}},
            "torch_autocast.enabled: .*fp16 or torch_autocast alone",
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"bias_correction": False, "amsgrad": True}}},
            "correct: none",
        ),
        ({"fp16": {"enabled": True}, "amp": {"enabled": True}}, "amp.enabled: .*fp16 or amp alone"),
        ({"amp": {"enabled": True, "opt_level": "O5"}}, "amp.opt_level: expected one of O0, O1, O2, O3"),
        ({"amp": {"enabled": True, "opt_level": "O3", "loss_scale": 8}}, "amp.loss_scale: 8.*O3 has none"),
        (
            {"torch_autocast": {"enabled": True, "dtype": "int8"}},
            "torch_autocast.dtype: expected fp32, fp16 or bf16",
        ),
        ({"pipeline": {"stages": -2}}, "pipeline.stages: -2 is not taken"),
        ({"pipeline": {"partition": "types:Linear"}}, "pipeline.partition: "),
        ({"stage": 3, "fp16": {}}, "unknown key 'stage'; it belongs to zero_optimization"),
        (
            {"train_batch_size": 8, "zero": {"stage": 2}},
            "zero: .*keep one kind.*train_batch_size.*batch.global_size",
        ),
    ],
    ids=str,
)
def test_what_is_wrong_is_said_by_its_path(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(given)


def test_all_faults_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load(
            {
                "train_batch_sise": 8,
                "fp16": {"enabled": 3},
                "zero_optimization": {"zero_quantized_weights": True},
            }
        )
    for said in ("train_batch_sise", "fp16.enabled: expected", "zero_optimization.zero_quantized_weights"):
        assert said in str(caught.value)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"train_batch_size": 64}, (64, 16, 1)),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}, (64, 4, 4)),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 4}, (64, 4, 4)),
        ({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4}, (64, 4, 4)),
        ({"train_micro_batch_size_per_gpu": 4}, (16, 4, 1)),
        ({"train_micro_batch_size_per_gpu": 4.0, "train_batch_size": "auto"}, (16, 4, 1)),
    ],
    ids=str,
)
def test_batch_sizes_follow_from_one_another_as_there(
    given: dict[str, Any], found: tuple[int, int, int]
) -> None:
    batch = resolve(load(given), 4, "cpu").config.batch
    assert (batch.global_size, batch.micro_size, batch.accumulation) == found


def test_auto_takes_what_is_known() -> None:
    given = {
        "train_micro_batch_size_per_gpu": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "offload_optimizer": "auto"},
    }
    alone = load(given)
    assert (alone.optimizer.lr, alone.max_grad_norm, alone.precision.compute) == (1e-3, 1.0, None)
    decays = {"total_num_steps": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}
    top = translate({**given, "scheduler": {"type": "WarmupDecayLR", "params": decays}}).config["schedule"]
    assert top == {
        "type": "warmup_linear",
        "min_lr": 0,
        "warmup_steps": 1000,
        "rise": "log",
    }  # to the optimizer's lr
    risen = {"type": "WarmupLR", "params": {"warmup_type": "cosine"}}
    assert translate({**given, "scheduler": risen}).config["schedule"]["rise"] == "cosine"
    known = {"train_micro_batch_size_per_gpu": 2, "optimizer.params.lr": 0.5, "bf16.enabled": True}
    made = translate(given, auto=known)
    assert made.config["optimizer"]["lr"] == 0.5 and made.config["precision"]["compute"] == "bf16"
    assert made.config["batch"]["micro_size"] == made.values["train_micro_batch_size_per_gpu"] == 2
    assert made.values["zero_optimization.reduce_bucket_size"] == 500_000_000


TUTORIAL = """
# a configuration as tutorials print it
{
  "train_batch_size": 16,
  "optimizer": {
    "type": "Adam",
    "params": { lr: 1e-3, betas: [ 0.8, 0.999 ] }
  }
  zero_optimization: {"stage": 2, "reduce_bucket_size": 5e7,}   // half
  'fp16': {enabled: true, loss_scale: 0}, /* "é" */
}
"""


@pytest.mark.parametrize(
    "form", ["json", "hjson", "yaml", "dictionary", "base64", "bytes of utf-8 with a mark"]
)
def test_all_forms_of_a_file_say_the_same(tmp_path: Path, form: str) -> None:
    plain = {
        "train_batch_size": 16,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.8, 0.999]}},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e7},
        "fp16": {"enabled": True, "loss_scale": 0},
    }
    source: Any = tmp_path / f"ds.{form.split()[0]}"
    if form == "dictionary":
        source = plain
    elif form == "base64":
        source = base64.urlsafe_b64encode(json.dumps(plain).encode()).decode()
    elif form == "yaml":
        source.write_text(json.dumps(plain), encoding="utf-8")
    else:
        source = tmp_path / "ds.json"
        source.write_bytes((TUTORIAL if "bytes" not in form else "\ufeff" + TUTORIAL).encode())
    config = load(source)
    assert (config.batch.global_size, config.zero.stage, config.optimizer.type) == (16, 2, "adamw")
    assert config == load(plain) and config.precision.compute == "fp16"
    assert load(source, ["zero.stage=3"]).zero.stage == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"train_batch_size": 8, "train_batch_size": 8}', "key 'train_batch_size' is given twice"),
        ("fp16: {enabled: true\n enabled: true}", "key 'enabled' is given twice, line 2, column 2"),
        ('{"train_batch_size": 8', "does not parse"),
        ("[1, 2]", "holds a list"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "ds.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path / "ds.json")


def test_infinity_is_a_number_of_steps_and_a_password_is_not_shown() -> None:
    assert translate({"steps_per_print": float("inf")}).values["steps_per_print"] == float("inf")
    with pytest.raises(ConfigError) as caught:
        translate({"comet": {"enabled": True, "api_key": "secret", "online": 3}})
    with pytest.raises(
        ConfigError, match="comet.project: null is not taken here; instead: the name of a project"
    ):
        translate({"comet": {"enabled": True}})
    assert "secret" not in str(caught.value)


def test_host_memory_is_a_tier_of_accelerators_and_where_cpu_ranks_keep_all_state() -> None:
    config = load({"train_batch_size": 8, "zero_optimization": {"stage": 2, "cpu_offload": True}})
    assert resolve(config, 2, "cpu").config.offload.optimizer == "device"
    assert resolve(config, 2, "cuda").config.offload.optimizer == "host"


def test_mics_is_a_mesh_of_copies() -> None:
    found = resolve(load(set_in(STAGE_3, "zero_optimization.mics_shard_size", 2)), 8, "cpu").mesh
    assert (found.dp_replicate, found.dp_shard) == (4, 2)


@pytest.mark.parametrize(
    ("optimizer", "parameters", "found"),
    [
        (("none", {}), ("none", {}), {}),
        (("cpu", {"nvme_path": "/a"}), None, {"optimizer": "host"}),
        (("cpu", {"ratio": 0.4}), None, {"optimizer": "host", "fraction": 0.4}),
        (("nvme", {"nvme_path": "/a", "ratio": 0.0}), None, {}),
        (("nvme", {"nvme_path": "/a"}), None, {"optimizer": "disk", "disk_path": "/a"}),
        (
            ("nvme", {"nvme_path": "/a", "buffer_count": 5}),
            None,
            {"optimizer": "disk", "disk_path": "/a", "buffers": 2},
        ),
        (
            ("nvme", {"nvme_path": "/a", "buffer_count": 0}),
            None,
            {"optimizer": "disk", "disk_path": "/a", "buffers": 1},
        ),
        (None, ("cpu", {}), {"optimizer": "host", "parameters": "host"}),
        (None, ("nvme", {"nvme_path": "/a"}), {"optimizer": "disk", "parameters": "disk", "disk_path": "/a"}),
        (
            ("nvme", {"nvme_path": "/a"}),
            ("cpu", {"nvme_path": "/b"}),
            {"optimizer": "disk", "parameters": "disk", "disk_path": "/a"},
        ),
        (
            ("cpu", {"nvme_path": "/b"}),
            ("nvme", {"nvme_path": "/a"}),
            {"optimizer": "disk", "parameters": "disk", "disk_path": "/a"},
        ),
        (
            ("nvme", {"nvme_path": "/a/"}),
            ("nvme", {"nvme_path": "/a"}),
            {"optimizer": "disk", "parameters": "disk", "disk_path": "/a/"},
        ),
    ],
)
def test_offloaded_state_lies_where_the_lower_block_says(
    optimizer: tuple[str, dict[str, Any]] | None,
    parameters: tuple[str, dict[str, Any]] | None,
    found: dict[str, Any],
) -> None:
    blocks = {"offload_optimizer": optimizer, "offload_param": parameters}
    given = {name: {"device": each[0], **each[1]} for name, each in blocks.items() if each}
    made = translate({"zero_optimization": {"stage": 3, **given}})
    assert made.config.get("offload", {}) == found
    RunConfig.parse(made.config)
