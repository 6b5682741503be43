"""The numbers of an optimizer's groups: lr, betas, momentum, weight decay, eps.

    the configuration      the options of ``optimizer:``, lr by ``schedule:``
    a user's optimizer     the content of its ``param_groups`` when a step begins. A scheduler of torch or transformers
                           has that object and writes there; so does ``optimizer.param_groups[0]["lr"] = x``.

The flat optimizers (flat.py) do the update; the user's object provides its class and its numbers and never steps. Its
numbers are part of a checkpoint and are loaded into it, as with ``optimizer.load_state_dict``. Functions that it cannot
provide are refused: its hooks would never be called, and its ``state`` and ``state_dict`` have no moments.
"""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from torch import Tensor, optim
from torch.utils.hooks import RemovableHandle

from shardwise.base.errors import ConfigError, MismatchError, UsageError
from shardwise.base.policy import Policy
from shardwise.optim.policy import OptimizerPolicy
from shardwise.optim.schedule import check_groups, factor, is_constant, rates, sets_rates
from shardwise.optim.schedule_policy import TorchSchedulePolicy
from shardwise.optim.torch_schedule import TorchSchedule

_HOOKS = (
    "step_pre_hook",
    "step_post_hook",
    "state_dict_pre_hook",
    "state_dict_post_hook",
    "load_state_dict_pre_hook",
    "load_state_dict_post_hook",
)


class _MomentsOfTheEngine(dict[Any, Any]):
    """The ``state`` of a user's optimizer while an engine steps in its place: any use of it raises UsageError.

    A loop over an empty dictionary, such as one that resets moments during a run, would silently do nothing.
    """

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise UsageError(
            "optimizer.state: the moments are the engine's, this object has none; engine.full_tensor(name, 'exp_avg') "
            "returns one and engine.set_full_tensor(name, value, 'exp_avg') writes one, whole and by the "
            "parameter's name"
        )

    __getitem__ = __setitem__ = __delitem__ = __iter__ = __len__ = __contains__ = _refuse
    get = setdefault = pop = popitem = keys = values = items = update = clear = copy = _refuse  # type: ignore[assignment]


class OptimizerGroups:
    """Numbers of an optimizer's groups, from the configuration or from a user's optimizer.

    Args:
        policy: the optimizer of the configuration.
        schedule: the schedule of the configuration.
        given: the user's optimizer; None takes the configuration's.

    Raises:
        ConfigError: if the schedule does not fit the groups.
        UsageError: if the user's optimizer has hooks, or if another engine uses it.
    """

    def __init__(
        self, policy: OptimizerPolicy, schedule: Policy, given: optim.Optimizer | None = None
    ) -> None:
        self.given = given
        """The user's optimizer, if one was given."""
        self._options = policy.options()
        self._schedule = schedule
        self._torch: TorchSchedule | None = None
        if isinstance(schedule, TorchSchedulePolicy):
            if given is not None:
                raise ConfigError(
                    f"schedule: type torch is for the optimizer of the configuration, and one was given; make "
                    f"{schedule.scheduler} on that one, and it is read before each step"
                )
            self._torch = TorchSchedule(schedule, self._options)
        check_groups(schedule, self._options if given is None else given.param_groups)
        if given is not None and "lr" not in given.param_groups[0]:
            raise UsageError(
                f"optimizer: the groups of {type(given).__name__} have no 'lr', from which the learning rate of a step "
                "is read; give a single optimizer with defaults of its own, such as torch.optim.AdamW"
            )
        self._first_lr = 0.0 if given is None else float(given.param_groups[0]["lr"])
        self._count = len(self._options if given is None else given.param_groups)
        self._ours: list[RemovableHandle] = []
        self._state: Any = None
        if given is not None:
            self._check_hooks()

    def hold(self) -> None:
        """Refuse uses of the user's optimizer that would have no effect, until ``release``."""
        if self.given is not None:
            self._ours = [
                self.given.register_state_dict_pre_hook(_refuse_state_dict),
                self.given.register_load_state_dict_pre_hook(_refuse_load_state_dict),
            ]
            self._state, self.given.state = self.given.state, _MomentsOfTheEngine()  # type: ignore[assignment]

    def release(self) -> None:
        """Restore the user's optimizer."""
        for handle in self._ours:
            handle.remove()
        if self.given is not None and self._ours:
            self.given.state = self._state
        self._ours = []

    def _check_hooks(self) -> None:
        ours = {handle.id for handle in self._ours}
        hooks = [
            (kind, hook)
            for kind in _HOOKS
            for number, hook in getattr(self.given, f"_optimizer_{kind}s").items()
            if number not in ours
        ]
        if any(hook is _refuse_state_dict for _, hook in hooks):
            raise UsageError(
                "optimizer: another engine works with it, and both would take their learning rates and write their "
                "loaded ones there; give each engine an optimizer of its own, or close() the other engine first"
            )
        found = [
            f"register_{kind} ({getattr(hook, '__name__', type(hook).__name__)})" for kind, hook in hooks
        ]
        if found:
            raise UsageError(
                f"optimizer: it has hooks of {', '.join(found)}, which would never be called: the engine steps on "
                "shards and saves by itself; remove them, and give initialize(..., on_step=[f]) a function of (engine, "
                "result), which is called after every step"
            )

    def rates(self, applied: int) -> list[dict[str, Any]]:
        """Return the numbers of each group in the step after ``applied`` ones.

        Raises:
            UsageError: if two schedules would write the learning rate, if groups were added, if hooks were registered,
                or if every learning rate is 0 and no schedule can raise it.
        """
        if self._torch is not None:
            return self._torch.rates(applied)
        if self.given is None:
            return rates(self._schedule, self._options, applied)
        self._check_hooks()
        groups = self.given.param_groups
        if len(groups) != self._count:
            raise UsageError(
                f"optimizer: it has {len(groups)} groups now and had {self._count} in initialize(); give it all groups "
                "before initialize()"
            )
        is_scheduled = any("initial_lr" in group for group in groups)
        if is_scheduled and not is_constant(self._schedule):
            raise UsageError(
                "schedule: the configuration has one and the given optimizer has a scheduler of its own (its groups "
                "carry initial_lr); both would write the learning rate, keep one"
            )
        is_set = is_scheduled or sets_rates(self._schedule)
        if not is_set and not any(float(group["lr"]) for group in groups):
            raise UsageError(
                "optimizer: the learning rate of every group is 0 and no scheduler is attached that could raise it, so "
                "no weight would ever move; give the optimizer a learning rate above 0"
            )
        return rates(self._schedule, groups, applied)

    def tables_factor(self, applied: int) -> float:
        """Return the factor of the learning rates of embedding tables.

        It is the schedule's factor. With a user's optimizer it also contains the lr of its first group as a share of
        its top (``max_lr``, else ``initial_lr``, else the lr at construction).
        """
        if self._torch is not None:
            return self._torch.factor(applied)
        if self.given is None:
            return factor(self._schedule, self._options[0], applied)
        first = self.given.param_groups[0]
        part = factor(self._schedule, first, applied)
        if sets_rates(self._schedule):
            return part
        top = float(first.get("max_lr", first.get("initial_lr", self._first_lr)))
        return part * float(first["lr"]) / top if top else part

    def note_step(self) -> None:
        """Record that a step was applied: torch's schedulers warn without this attribute."""
        if self.given is not None:
            self.given._opt_called = True  # type: ignore[attr-defined]

    def state(self) -> list[dict[str, Any]] | None:
        """Return the numbers in the given optimizer's groups, as JSON; None without an optimizer."""
        if self.given is None:
            return None
        return [
            {key: _plain(value) for key, value in group.items() if key != "params" and _is_number(value)}
            for group in self.given.param_groups
        ]

    def check_state(self, state: Sequence[Mapping[str, Any]] | None) -> None:
        """Check that ``state`` was saved from as many groups.

        Raises:
            MismatchError: if the number of groups differs.
        """
        if self.given is None or state is None:
            return
        groups = self.given.param_groups
        if len(state) != len(groups):
            raise MismatchError(
                f"optimizer: the step was saved with {len(state)} groups, the one given now has {len(groups)}; give "
                "the groups it was saved with, or load(..., weights_only=True)"
            )

    def load_state(self, state: Sequence[Mapping[str, Any]] | None) -> None:
        """Write saved numbers, which ``check_state`` has checked, into the given optimizer's groups."""
        if self.given is None or state is None:
            return
        groups = self.given.param_groups
        for group, saved in zip(groups, state, strict=True):
            for key, value in saved.items():
                if isinstance(group.get(key), Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = tuple(value) if isinstance(value, list) else value


def mark_of(rates_of_groups: Sequence[Mapping[str, Any]]) -> int:
    """Return 32 bits that differ if ranks use different numbers, as with a scheduler that reads a rank's own loss."""
    numbers = [
        sorted((key, _plain(value)) for key, value in group.items() if _is_number(value))
        for group in rates_of_groups
    ]
    return zlib.crc32(repr(numbers).encode())


def _refuse_state_dict(optimizer: optim.Optimizer) -> NoReturn:
    raise UsageError(
        "optimizer.state_dict(): the moments are the engine's, this object has none; engine.save(directory) saves them "
        "with the numbers of this optimizer's groups"
    )


def _refuse_load_state_dict(optimizer: optim.Optimizer, state: Any) -> NoReturn:
    raise UsageError(
        "optimizer.load_state_dict(): what this object is given does not reach the engine, which has the moments; "
        "engine.load(directory) loads what engine.save saved"
    )


def _is_number(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(_is_number(each) for each in value)
    return (
        value is None
        or isinstance(value, bool | int | float)
        or (isinstance(value, Tensor) and value.numel() == 1)
    )


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return float(value) if isinstance(value, Tensor) else value
