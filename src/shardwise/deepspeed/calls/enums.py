"""DeepSpeed's enums: ZeRO stages, devices and kinds of offloaded state, and the states of a parameter."""

from enum import Enum, StrEnum


class ZeroStageEnum(int, Enum):
    """The ZeRO stages, each named after what it cuts in addition to the stage before."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3  # noqa: PIE796  an alias of the last stage


class OffloadDeviceEnum(StrEnum):
    """The devices to which state can be offloaded."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(StrEnum):
    """The kinds of state that ``engine.offload_states`` can move."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class ValidationMode:
    """The reactions to ranks that save under different tags."""

    WARN = "WARN"
    IGNORE = "IGNORE"
    FAIL = "FAIL"


class ZeroParamStatus(Enum):
    """The availability of a parameter's elements on this rank."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class ZeroParamType(Enum):
    """The kinds of parameters."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3
