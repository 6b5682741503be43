"""Words that scripts pass where DeepSpeed has enums: stages, places of offloaded state, where parameters are."""

from enum import Enum, StrEnum


class ZeroStageEnum(int, Enum):
    """Stages by what each cuts first."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3  # noqa: PIE796  the last of them


class OffloadDeviceEnum(StrEnum):
    """Where state may lie."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(StrEnum):
    """Kinds of state that ``engine.offload_states`` is asked to move."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class ValidationMode:
    """What happens where ranks save under unlike tags."""

    WARN = "WARN"
    IGNORE = "IGNORE"
    FAIL = "FAIL"


class ZeroParamStatus(Enum):
    """Where the elements of a parameter are."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class ZeroParamType(Enum):
    """Kinds of parameters."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3
