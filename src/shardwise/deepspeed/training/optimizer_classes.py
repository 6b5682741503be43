"""``deepspeed.ops``: optimizers under the names of DeepSpeed's kernels.

Each class makes torch's optimizer of the same formula, or this package's if torch has none. The engine runs the
optimizer on its shards on any device, fused if torch has a fused version.
"""

from collections.abc import Iterable
from typing import Any

from torch import optim

from shardwise.base.errors import UsageError
from shardwise.deepspeed.training.optimizer import PlainOptimizer
from shardwise.optim.lamb import Lamb
from shardwise.optim.lion import Lion
from shardwise.optim.named_rules import NamedRules
from shardwise.optim.uncorrected_adam import UncorrectedAdam, UncorrectedAdamW

Groups = Iterable[Any]
_ADAM_RULES = ("adam", "adamw", "uncorrected_adam", "uncorrected_adamw")
_ADAM_CLASSES = (optim.Adam, optim.AdamW, UncorrectedAdam)


class _UpdateRuleType(type):
    """A metaclass of classes that stand for update rules; an optimizer with one of the rules is an instance."""

    rules: tuple[str, ...]
    classes: tuple[type[optim.Optimizer], ...]

    def __instancecheck__(cls, given: Any) -> bool:
        inner = given.optimizer if type(given) is PlainOptimizer else given
        if isinstance(inner, NamedRules):
            return {group["type"] for group in inner.param_groups} <= {*cls.rules}
        return isinstance(inner, cls.classes)


class FusedAdam(metaclass=_UpdateRuleType):
    """A constructor of torch's AdamW, or of Adam if ``adam_w_mode`` is False."""

    rules = _ADAM_RULES
    classes = _ADAM_CLASSES

    def __new__(  # type: ignore[misc]
        cls,
        params: Groups,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> optim.Optimizer:
        """Make the optimizer and return it.

        Raises:
            UsageError: if ``amsgrad`` is combined with ``bias_correction=False``.
        """
        if not bias_correction:
            if amsgrad:
                raise UsageError(
                    "FusedAdam: amsgrad with bias_correction=False is not a rule here; leave one out"
                )
            plain = UncorrectedAdamW if adam_w_mode else UncorrectedAdam
            return plain(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        made = optim.AdamW if adam_w_mode else optim.Adam
        return made(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)


class DeepSpeedCPUAdam(metaclass=_UpdateRuleType):
    """A constructor of torch's AdamW, or of Adam if ``adamw_mode`` is False.

    Moments are always fp32: ``fp32_optimizer_states`` has no effect.
    """

    rules = _ADAM_RULES
    classes = _ADAM_CLASSES

    def __new__(  # type: ignore[misc]
        cls,
        model_params: Groups,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> optim.Optimizer:
        """Make the optimizer and return it.

        Raises:
            UsageError: if ``amsgrad`` is combined with ``bias_correction=False``.
        """
        return FusedAdam(  # type: ignore[return-value]
            model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad
        )


class DeepSpeedCPUAdagrad(metaclass=_UpdateRuleType):
    """A constructor of torch's Adagrad."""

    rules = ("adagrad",)
    classes = (optim.Adagrad,)

    def __new__(  # type: ignore[misc]
        cls,
        model_params: Groups,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> optim.Optimizer:
        """Make the optimizer and return it."""
        return optim.Adagrad(model_params, lr=lr, eps=eps, weight_decay=weight_decay)


class FusedLion(metaclass=_UpdateRuleType):
    """A constructor of Lion (optim/lion.py)."""

    rules = ("lion",)
    classes = (Lion,)

    def __new__(  # type: ignore[misc]
        cls,
        params: Groups,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> optim.Optimizer:
        """Make the optimizer and return it."""
        return Lion(params, lr=lr, betas=betas, weight_decay=weight_decay)


DeepSpeedCPULion = FusedLion


class FusedLamb(metaclass=_UpdateRuleType):
    """A constructor of LAMB with the bias correction of DeepSpeed's kernel: of the step, not of the moments."""

    rules = ("lamb",)
    classes = (Lamb,)

    def __new__(  # type: ignore[misc]
        cls,
        params: Groups,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> optim.Optimizer:
        """Make the optimizer and return it.

        Raises:
            UsageError: if ``eps_inside_sqrt``, ``amsgrad`` or ``max_grad_norm`` is given.
        """
        if eps_inside_sqrt or amsgrad or max_grad_norm:
            raise UsageError(
                "FusedLamb: eps_inside_sqrt, amsgrad and max_grad_norm are not here; leave them out, and say "
                "gradient_clipping in the configuration"
            )
        return Lamb(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            trust_bounds=(min_coeff, max_coeff),
            correct="step" if bias_correction else "none",
        )
