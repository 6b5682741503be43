"""compose/apply.py lists all that is done to a user's module.

Every module of a model is compared before and after each step of the build, inside passes, and after ``close()``. A
difference that no row of the list accounts for fails, and so does a row that leaves no difference in any layout.
"""

import ast
import functools
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import transformers
from torch import Tensor, nn

import shardwise
from shardwise.comm.world import join
from shardwise.compose import apply, module_steps
from shardwise.compose.apply import CHANGES, WALKED, Effect, ModuleChange, Phase, Undone, apply_steps
from shardwise.engine.construction import build, outline, stages
from shardwise.engine.model import held
from shardwise.engine.step import forward
from shardwise.models import Gpt, GptPolicy
from tests.engine import tables_net
from tests.engine.halves import in_halves
from tests.engine.nets import LLAMA, seeded
from tests.engine.test_experts import Mixture
from tests.precision import fp8_net

SOURCE = Path(shardwise.__file__).parent
ROWS = {change.name: change for change in CHANGES}
OUTSIDE = "between the steps"

# The list and its walk ---------------------------------------------------------------------------------------------


def nothing() -> None:
    """A step that changes nothing."""


def test_a_name_stands_once_and_phases_follow_one_another() -> None:
    assert len(ROWS) == len(CHANGES)
    order = [list(Phase).index(change.phase) for change in CHANGES]
    assert order == sorted(order)


@pytest.mark.parametrize("phase", WALKED, ids=lambda phase: phase.name)
def test_steps_run_in_the_order_of_the_rows(phase: Phase) -> None:
    names = [change.name for change in CHANGES if change.phase is phase]
    ran: list[str] = []
    apply_steps(phase, {name: functools.partial(ran.append, name) for name in reversed(names)})
    assert ran == names


@pytest.mark.parametrize("phase", WALKED, ids=lambda phase: phase.name)
def test_a_row_without_a_step_and_a_step_without_a_row_are_errors(phase: Phase) -> None:
    steps: dict[str, apply.Step] = {change.name: nothing for change in CHANGES if change.phase is phase}
    last = next(reversed(steps))
    with pytest.raises(AssertionError, match=r"rows of compose/apply.py without a step: \['"):
        apply_steps(phase, {name: step for name, step in steps.items() if name != last})
    with pytest.raises(AssertionError, match=r"steps without a row in compose/apply.py: \['another'\]"):
        apply_steps(phase, {**steps, "another": nothing})


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase not in WALKED])
def test_other_phases_are_not_walked(phase: Phase) -> None:
    with pytest.raises(AssertionError, match="no fixed order"):
        apply_steps(phase, {change.name: nothing for change in CHANGES if change.phase is phase})


# Which files change modules ----------------------------------------------------------------------------------------

NOT_A_USERS_MODULE = {
    "deepspeed/calls/cpu_for_cuda.py": "functions of torch",
    "deepspeed/files/saved.py": "counters",
    "deepspeed/importer.py": "a model on its way in, before initialize",
    "deepspeed/training/config_models.py": "a configuration",
    "deepspeed/training/instructions.py": "an instruction",
    "deepspeed/training/settings.py": "a configuration",
    "engine/state/state.py": "buffers in close(), which undoes row buffers",
    "engine/step/check.py": "the copy of the uncut model",
    "engine/step/uncut.py": "the copy of the uncut model",
    "kernels/operation.py": "a function",
    "launch/__init__.py": "a Python module",
    "launch/terminal.py": "the terminal",
    "optim/flat.py": "the masters of an optimizer",
    "optim/flat_state.py": "the masters of an optimizer",
    "observe/action_ranges.py": "the walker",
    "optim/groups.py": "the user's optimizer",
    "parallel/expert/experts.py": "a module of the package, when it is made",
    "kernels/tables/hash_index.py": "the columns of an index",
    "parallel/expert/router.py": "a module of the package, when it is made",
    "serving/scorer.py": "a model of a Scorer, which no engine has",
    "simulate/lookups.py": "a model that is measured and dropped",
    "simulate/passes.py": "a model that is measured and dropped",
    "simulate/placements.py": "a model on shapes, which is dropped",
    "tiers/tier_cost.py": "a record of costs",
    "verify/__init__.py": "a Python module",
    "verify/shrink.py": "a model that is made smaller, before initialize",
    "verify/own.py": "a model of verify, which is measured and dropped",
    "verify/reference.py": "a model of verify, which is measured and dropped",
    "verify/record.py": "a model of verify, which is measured and dropped",
}
REGISTERS = {"swap_tensors", "register_parameter", "register_buffer", "add_module"}
ASSIGNED = {"forward", "__class__", "_apply", "data", "_forward_hooks", "_forward_pre_hooks"}
HELD = ("__dict__", "_modules", "_parameters", "_buffers")


def is_a_change(node: ast.AST) -> bool:
    """Whether a statement may hang something on a module: registers, assigns, or writes into its dictionaries."""
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Name):
            return node.func.id == "setattr"
        if not isinstance(node.func, ast.Attribute):
            return False
        name, owner = node.func.attr, ast.unparse(node.func.value)
        registers = name in REGISTERS or (name.startswith("register_") and name.endswith("_hook"))
        is_tensors = name == "register_hook"  # of a value in a graph
        writes = name in ("update", "pop") and (owner.startswith("vars(") or owner.endswith(HELD))
        return (registers and not is_tensors) or writes
    targets = node.targets if isinstance(node, ast.Assign) else []
    for target in [each for one in targets for each in (one.elts if isinstance(one, ast.Tuple) else [one])]:
        owner = ast.unparse(target.value) if isinstance(target, ast.Attribute | ast.Subscript) else ""
        if isinstance(target, ast.Attribute) and target.attr in ASSIGNED and owner != "self":
            return True
        if isinstance(target, ast.Subscript) and (owner.startswith("vars(") or owner.endswith(HELD)):
            return True
    return False


@pytest.mark.parametrize(
    "line",
    [
        "module.register_forward_hook(hook)",
        "module.register_load_state_dict_pre_hook(hook)",
        "block.forward = compiled(block.forward)",
        "vars(module)['_apply'] = self",
        "module._modules[name] = other",
        "setattr(module, name, method)",
        "a.forward, b.forward = b.forward, a.forward",
        "parameter.data = view",
    ],
)
def test_changes_are_found(line: str) -> None:
    assert any(map(is_a_change, ast.walk(ast.parse(line))))


def test_every_file_that_changes_modules_is_named_by_a_row() -> None:
    found = {
        file.relative_to(SOURCE).as_posix()
        for file in SOURCE.rglob("*.py")
        if any(map(is_a_change, ast.walk(ast.parse(file.read_text(encoding="utf-8")))))
    }
    listed = {file for change in CHANGES for file in change.where}
    assert not found - listed - NOT_A_USERS_MODULE.keys(), "give compose/apply.py a row"
    assert not NOT_A_USERS_MODULE.keys() - found, "take these out of the table above"
    assert not NOT_A_USERS_MODULE.keys() & listed
    for file in listed:
        assert (SOURCE / file).is_file(), file


# Differences of modules --------------------------------------------------------------------------------------------


class Key(NamedTuple):
    """One thing that a module has."""

    effect: Effect
    module: int
    name: str


Look = dict[Key, Any]
_TORCHS_OWN = frozenset(vars(nn.Module()))


def look(roots: list[nn.Module], has_tensors: bool = True) -> Look:
    """Everything that can be hung on the modules of ``roots``, and where their tensors lie."""
    found: Look = {}
    modules = {id(module): module for root in roots for module in root.modules()}
    for module in modules.values():
        found[Key(Effect.CHILD, id(module), "")] = module
        for key, value in vars(module).items():
            if key.endswith("_hooks") and isinstance(value, dict):
                effect = Effect.STATE_HOOK if "state_dict" in key else Effect.HOOK
                for number, hook in value.items():
                    found[Key(effect, id(module), f"{key} {number}")] = hook
            elif key not in _TORCHS_OWN:
                method = Effect.METHOD if callable(getattr(type(module), key, None)) else Effect.ATTRIBUTE
                found[Key(method, id(module), key)] = value
        for key, child in module._modules.items():
            found[Key(Effect.CHILD, id(module), key)] = child
        tensors = {**module._parameters, **module._buffers} if has_tensors else {}
        for key, tensor in tensors.items():
            if tensor is not None:
                found |= of_tensor(id(module), key, tensor)
    return found


def of_tensor(module: int, name: str, tensor: Tensor) -> Look:
    found: Look = {}
    with torch._C.DisableTorchFunctionSubclass():
        lies = (
            None
            if isinstance(tensor, torch.Tensor) and type(tensor).__name__ == "PieceTensor"
            else address(tensor)
        )
        found[Key(Effect.MEMORY, module, name)] = (tensor.dtype, tuple(tensor.shape), lies)
        if isinstance(tensor, nn.Parameter):
            found[Key(Effect.PARAMETER, module, name)] = (id(tensor), type(tensor))
            for key in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                for number, hook in (getattr(tensor, key) or {}).items():
                    found[Key(Effect.PARAMETER_HOOK, module, f"{name} {key} {number}")] = hook
    return found


def address(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a tensor without storage
        return -1


def is_same(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, tuple | int | str | float) and one == other)


def differences(before: Look, after: Look) -> set[Key]:
    """Keys that were added, taken away or given another value; a module that comes or goes counts as one."""
    known = {key.module for key in before} & {key.module for key in after}
    absent = object()
    return {
        key
        for key in {**before, **after}
        if not is_same(before.get(key, absent), after.get(key, absent))
        and (key.module in known or (key.effect is Effect.CHILD and not key.name))
    }


def file_of(hook: Any) -> str:
    """The file, below the package, of a function that hangs on a module; "" for others."""
    while True:
        inner = (
            getattr(hook, "func", None)
            or getattr(hook, "__func__", None)
            or getattr(hook, "__wrapped__", None)
        )
        if inner is None:
            break
        hook = inner
    code = getattr(hook, "__code__", None) or getattr(type(hook).__call__, "__code__", None)
    path = Path(code.co_filename) if code is not None else Path()
    return path.relative_to(SOURCE).as_posix() if path.is_relative_to(SOURCE) else ""


class Observer:
    """Compares a model's modules around every step of the build, and inside passes."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.roots = [model]
        self.first = self._last = look(self.roots)
        self.by_row: dict[str, set[Key]] = {}
        self.in_passes: set[tuple[Effect, str]] = set()
        """Hooks and methods that were there in a pass only, with their files."""

    def note(self, name: str) -> None:
        """Note under ``name`` what has changed since the last call."""
        now = look(self.roots)
        self.by_row.setdefault(name, set()).update(differences(self._last, now))
        self._last = now

    def walk(self, phase: Phase, steps: Mapping[str, apply.Step]) -> None:
        def observed(name: str, step: apply.Step) -> Callable[[], None]:
            def run() -> None:
                self.note(OUTSIDE)
                step()
                self.note(name)

            return run

        apply_steps(phase, {name: observed(name, step) for name, step in steps.items()})

    def cut(self, *given: Any) -> module_steps.ModelCut:
        made = module_steps.ModelCut(*given)
        inner = made._cut_stages

        def cut_stages() -> None:
            inner()
            self.roots += [module for module, _ in made.stages.values() if module is not self.model]

        made._cut_stages = cut_stages  # type: ignore[method-assign]
        return made

    def see_pass(self, *_: Any) -> None:
        """A hook of a user's: notes what hangs on the modules while a pass runs."""
        now = look(self.roots, has_tensors=False)  # a pass may refuse to show them
        for key in differences(self._last, now):
            if key.effect in (Effect.HOOK, Effect.METHOD, Effect.STATE_HOOK) and key in now:
                self.in_passes.add((key.effect, file_of(now[key])))

    def patches(self) -> ExitStack:
        stack = ExitStack()
        for owner in (build, stages, held, module_steps):
            stack.enter_context(patch.object(owner, "apply_steps", self.walk))
        stack.enter_context(patch.object(build, "ModelCut", self.cut))
        return stack


# Engines on layouts that use every row -----------------------------------------------------------------------------


class Noted(NamedTuple):
    """What one engine did to its model."""

    by_row: dict[str, set[Effect]]
    in_passes: set[tuple[Effect, str]]
    stayed: list[str]
    """Differences after ``close()`` that no row allows."""


class Block(nn.Module):
    """Has what an engine replaces: batch norm, dropout, a forward to run again, a method."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.inner = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.inner(self.norm(x)))

    def doubled(self, x: Tensor) -> Tensor:
        return 2 * self.inner(x)


class Net(nn.Module):
    """Blocks and a loss, as two modules of a class show that they are blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.register_buffer("factor", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return (x * self.factor).square().mean()


def rows_of_net(step: int) -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(step))


def run(world: Any, model: nn.Module, config: dict[str, Any], batches: list[Any], **rest: Any) -> Noted:
    """Build an engine, train a step if there are ``batches``, and close it."""
    observer = Observer(model)
    blocks = [module for name, module in model.named_modules() if name.endswith("1") and "." in name]
    probes = [each.register_forward_hook(observer.see_pass) for each in (blocks or [model])[:1]]
    observer.first = observer._last = look(observer.roots)
    given = {"check_first_step": "off", "comm": {"timeout_s": 60.0}, **config}
    with observer.patches():
        engine = shardwise.initialize(model, given, world=world, **rest)
        observer.note(OUTSIDE)
    if batches:
        engine.train_step(batches)
    if world.size == 1 or given.get("mesh", {}).get("pp", 1) == 1:
        observer._last = look(observer.roots)
        engine.adopt_backward()
        observer.note("plain backward")
    engine.close()
    mesh = engine._parts.mesh
    cuts = mesh.size("model") * mesh.ep * mesh.etp > 1
    stayed = kept(observer, cuts)
    for probe in probes:
        probe.remove()
    by_row = {name: {key.effect for key in keys} for name, keys in observer.by_row.items()}
    return Noted(by_row, observer.in_passes, stayed)


def kept(observer: Observer, cuts: bool) -> list[str]:
    """Differences after ``close()`` of modules that the user has made, which no row that changed them allows."""
    now = look([observer.model])
    found: list[str] = []
    for key in differences(observer.first, now):
        before, after = observer.first.get(key), now.get(key)
        if (
            key.effect is Effect.MEMORY
            and before is not None
            and after is not None
            and before[:2] == after[:2]
        ):
            continue  # other memory of its own
        owner = observer.first.get(Key(Effect.CHILD, key.module, ""))
        if key.effect is Effect.ATTRIBUTE and type(owner).__module__.startswith("shardwise."):
            continue  # the state of a module of the package, which a pass changes
        rows = [ROWS[name] for name, keys in observer.by_row.items() if key in keys and name in ROWS]
        if not any(stays(row, cuts) for row in rows):
            found.append(f"{key.effect.name} {key.name} by {[row.name for row in rows]}: {before} -> {after}")
    return found


def stays(row: ModuleChange, cuts: bool) -> bool:
    return row.undone is Undone.NEVER or (cuts and row.undone is Undone.IF_WHOLE)


def compiler(*_: Any) -> Callable[[Any], Any]:
    """Stand-in of ``torch.compile``."""
    return lambda forward: functools.wraps(forward)(lambda *args: forward(*args))


def whole(world: Any) -> Noted:
    config = {
        "zero": {"stage": 3, "forward_methods": ["blocks.*.doubled"]},
        "batch_norm": "synchronized",
        "recompute": "full",
        "compile": {"scope": "blocks", "backend": "eager"},
    }
    with patch.object(stages, "_compiler", compiler):
        return run(world, Net(), config, [rows_of_net(world.rank)])


def graphs(world: Any) -> Noted:
    """Without a pass, whose hook would import inductor."""
    config = {"compile": {"scope": "blocks", "backend": "inductor", "cuda_graphs": True}}
    with patch.object(stages, "_compiler", compiler):
        return run(world, Net(), config, [])


def by_operation(world: Any) -> Noted:
    config = {
        "precision": {"compute": "fp32", "operations": "bf16", "keep_fp32": ["*norm*"]},
        "module_profile": {"output": "/dev/null", "step": 1},
        "zero": {"stage": 1},
    }
    return run(world, Net(), config, [rows_of_net(world.rank)])


def activations(world: Any) -> Noted:
    """Without a pass, which would need the streams of a device."""
    # The resolved configuration of a rank on a CPU leaves activations where they are.
    with patch.object(outline, "check_blocks", lambda names, policy: list(names)):
        return run(world, Net(), {}, [])


def sequences(seed: int = 1) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 13, (4, 7), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def gpt(world: Any, **mesh: int) -> Noted:
    model = seeded(Gpt, GptPolicy(layers=4, width=8, heads=2, context=6, vocab=13, dropout=0.1))
    config = {
        "mesh": mesh,
        "module_profile": {"output": "/dev/null", "step": 1},
        "tiles": {"mlp": 2, "logits": 2},
        "precision": "fp64",
    }
    return run(world, model, config, [sequences()])


def slices(world: Any) -> Noted:
    return gpt(world, tp=2)


def pipeline(world: Any) -> Noted:
    return gpt(world, pp=2)


def halves(world: Any) -> Noted:
    with in_halves(0):
        return pipeline(world)


def mixture(world: Any) -> Noted:
    config = {"mesh": {"dp": 2, "ep": 2}, "precision": "fp64"}
    return run(world, seeded(Mixture), config, [sequences(world.rank)])


def tables(world: Any) -> Noted:
    return run(world, tables_net.Net({}), {"precision": "fp64"}, [tables_net.batch(0)])


def in_pieces(world: Any) -> Noted:
    with shardwise.sharded_init():
        model = Net()
    config = {"zero": {"stage": 3}, "precision": {"compute": "bf16", "buffers": "bf16"}}
    return run(world, model, config, [rows_of_net(world.rank)])


def of_specs(world: Any) -> Noted:
    layers = [shardwise.LayerSpec(nn.Linear, 4, 4), torch.tanh, shardwise.LayerSpec(nn.Linear, 4, 2)]
    model = shardwise.Layers(layers, loss=nn.functional.mse_loss)
    return run(world, model, {}, [(torch.ones(2, 4), torch.zeros(2, 2))])


def in_fp8(world: Any) -> Noted:
    config = {"precision": {"compute": "fp32", **fp8_net.FP8}, "zero": {"stage": 3}}
    return run(world, fp8_net.net(), config, [fp8_net.batch(0, world.rank)])


def fp8_slices(world: Any) -> Noted:
    model = seeded(
        Gpt, GptPolicy(layers=2, width=32, heads=2, hidden=32, context=16, vocab=13), dtype=torch.float32
    )
    tokens = torch.ones(1, 16, dtype=torch.long)
    config = {"precision": {"compute": "fp32", **fp8_net.FP8}, "mesh": {"tp": 2}}
    return run(world, model, config, [(tokens, tokens)])


def llama() -> nn.Module:
    return seeded(transformers.LlamaForCausalLM, transformers.LlamaConfig(**LLAMA, vocab_size=13))


def gemma() -> nn.Module:
    """The class of its embedding has a factor, so that the embedding is cut in its place."""
    config = transformers.Gemma3TextConfig(**LLAMA, vocab_size=13, head_dim=4, sliding_window=4)
    return seeded(transformers.Gemma3ForCausalLM, config)


def foreign(world: Any, model: nn.Module, config: dict[str, Any]) -> Noted:
    tokens, _ = sequences()
    return run(world, model, {"precision": "fp64", **config}, [{"input_ids": tokens, "labels": tokens}])


def foreign_head(world: Any) -> Noted:
    return foreign(world, llama(), {"tiles": {"logits": 3, "mlp": 3}})


def sequences_in_parts(world: Any) -> Noted:
    return gpt(world, cp=2)


def foreign_sequences(world: Any) -> Noted:
    return foreign(world, llama(), {"mesh": {"cp": 2}})


def foreign_slices(world: Any) -> Noted:
    return foreign(world, gemma(), {"mesh": {"tp": 2}})


LAYOUTS: dict[str, tuple[int, Callable[[Any], Noted]]] = {
    "whole": (2, whole),
    "graphs": (1, graphs),
    "by operation": (1, by_operation),
    "activations": (1, activations),
    "slices": (2, slices),
    "pipeline": (2, pipeline),
    "halves": (2, halves),
    "mixture": (2, mixture),
    "tables": (1, tables),
    "in pieces": (2, in_pieces),
    "of specs": (1, of_specs),
    "in fp8": (2, in_fp8),
    "fp8 slices": (2, fp8_slices),
    "foreign head": (1, foreign_head),
    "foreign slices": (2, foreign_slices),
    "sequences": (2, sequences_in_parts),
    "foreign sequences": (2, foreign_sequences),
}


@pytest.fixture(scope="module")
def noted(ranks: Any) -> dict[str, list[Noted]]:
    return {name: ranks(size).run(layout) for name, (size, layout) in LAYOUTS.items()}


def unaccounted(found: Noted) -> list[str]:
    """Sentences on what no row has."""
    told = [
        f"{row}: {effect.value}"
        for row, effects in found.by_row.items()
        for effect in effects
        if row == OUTSIDE or effect not in ROWS[row].effects
    ]
    allowed = {
        (effect, file)
        for change in CHANGES
        if change.phase is Phase.PASS or change.name == "tiles"
        for effect in change.effects
        for file in change.where
    }
    return told + [f"in a pass: {effect.value} of {file}" for effect, file in found.in_passes - allowed]


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_difference_belongs_to_a_row(noted: dict[str, list[Noted]], name: str) -> None:
    assert [unaccounted(found) for found in noted[name]] == [[]] * LAYOUTS[name][0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_close_undoes_what_the_list_says(noted: dict[str, list[Noted]], name: str) -> None:
    assert [found.stayed for found in noted[name]] == [[]] * LAYOUTS[name][0]


MOVES_ALONE = {"start"}
"""Changes that ranks on a CPU do not show: the move of buffers to a device."""


def test_every_row_of_the_build_changes_a_module(noted: dict[str, list[Noted]]) -> None:
    """Each effect of a row is seen in a layout, so that no row claims more than its step does."""
    seen: dict[str, set[Effect]] = {}
    for found in (each for all_ranks in noted.values() for each in all_ranks):
        for row, effects in found.by_row.items():
            seen.setdefault(row, set()).update(effects)
    for change in CHANGES:
        if change.phase in WALKED and change.name not in MOVES_ALONE:
            assert seen.get(change.name, set()) == change.effects, change.name


def test_hooks_of_passes_are_seen(noted: dict[str, list[Noted]]) -> None:
    files = {file for all_ranks in noted.values() for found in all_ranks for _, file in found.in_passes}
    for name in ("own use", "profile", "random numbers", "blocks that ran"):
        assert files & set(ROWS[name].where), name


# A change that no row has ------------------------------------------------------------------------------------------


def found_with(owner: Any, name: str, planted: Callable[..., Any]) -> Noted:
    with patch.object(owner, name, planted):
        return run(join(quiet=True), Net(), {}, [rows_of_net(0)])


def hook_of_a_stranger(*_: Any) -> None:
    """A hook that no row names."""


def test_a_hook_in_a_step_of_another_row_is_found() -> None:
    def planted(module: nn.Module, *given: Any) -> None:
        module.register_forward_hook(hook_of_a_stranger)

    found = found_with(stages, "move_buffers", planted)
    assert unaccounted(found) == ["buffers: a hook on a module"]
    assert len(found.stayed) == 1 and "by ['buffers']" in found.stayed[0]


def test_a_change_between_two_steps_is_found() -> None:
    right = build.assemble

    def planted(model: nn.Module, *given: Any) -> Any:
        model.get_submodule("blocks.0").forward = torch.relu
        return right(model, *given)

    found = found_with(build, "assemble", planted)
    assert unaccounted(found) == [f"{OUTSIDE}: a function in place of a method"]
    assert len(found.stayed) == 1


def test_a_hook_that_a_pass_registers_is_found() -> None:
    right = forward.call_model

    def planted(model: nn.Module, *given: Any) -> Any:
        handle = model.register_forward_hook(hook_of_a_stranger)
        try:
            return right(model, *given)
        finally:
            handle.remove()

    found = found_with(forward, "call_model", planted)
    assert unaccounted(found) == ["in a pass: a hook on a module of "] and not found.stayed
