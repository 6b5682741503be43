"""Absent values: tensors of the right shape whose numbers are elsewhere, and what may be done with them.

A stage runs the whole model's forward pass with stand-ins for what lives on other stages, and at ZeRO stage 3 a weight
is there while its Unit runs and not at other times. A result may be built around such a value (its shape, dtype and
device are right) as long as none of its numbers is used. Two marks keep watch over that:

    Absent     a tensor whose numbers nobody has. What is computed from one is Absent again and remembers whence,
               through comparisons, argmax, nan_to_num and custom functions too: the mark travels below autograd, in
               torch's dispatcher, and has no memory that anybody could read past it
    withhold   a Parameter whose numbers are not here now: any use of them is an error on the spot, and so are others
               in their place (``p.data = ...``), which would not stay. The mark is the Parameter's class
    expect     a Parameter whose numbers are on their way: who uses them waits first

    of either                                             is
    shape, dtype, device, zeros_like, new_ones ...        an ordinary value: nothing of the numbers is in it
    bool(), item(), nonzero(), a write into a tensor      an error on the spot

An error names what is absent, the module whose forward used it, and the line of the model's source.

Cost: an Absent operation takes Python's time (tens of microseconds), so stages make them in the first pass of each kind
alone; ``withhold`` costs a quarter of a microsecond per parameter and release. What is there takes no detour in either.
"""

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from shardwise.plan.errors import PlanError, ShardwiseError, UsageError


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SHAPE_ONLY = _words(
    "zeros_like ones_like empty_like full_like rand_like randn_like randint_like empty_permuted new_zeros "
    "new_ones new_empty new_full new_tensor new_empty_strided result_type"
)
"""Operations whose result has nothing of the numbers."""
_OTHER_SHAPE = _words("type_as view_as expand_as reshape_as to sum_to_size is_same_size to_copy _to_copy")
"""Operations that take a second tensor for its shape or dtype alone."""
_DECIDES_A_SHAPE = _words("nonzero nonzero_numpy unique_dim unique_consecutive _unique _unique2 bincount")
_NOT_OURS = (
    "torch.",
    "shardwise.memory.",
    "shardwise.parallel.",
    "shardwise.engine.",
    "shardwise.compose.",
    "shardwise.plan.",
)


class SourceLine(NamedTuple):
    """Where in a model's source something happens."""

    module: str
    """Name of the module whose forward runs; empty outside of all."""
    line: str
    """``file:line``; empty where no line of the model's is known."""

    def __str__(self) -> str:
        inside = (
            f"in the forward pass of {self.module}"
            if self.module
            else "outside of every module's forward pass"
        )
        return f"{inside}, at {self.line}" if self.line else inside


def place_of_use(names: Mapping[int, str] | None = None) -> SourceLine:
    """The innermost line that is neither torch's nor ours, and the innermost module that runs.

    ``names`` of modules by identity; others are named by their class.
    """
    frame, module, line = sys._getframe(1), "", ""
    while frame is not None:
        owner = str(frame.f_globals.get("__name__", ""))
        if not module and not owner.startswith(("torch.nn.modules.module", *_NOT_OURS[1:])):
            module = _module_that_runs(frame, names or {})
        if not (owner == "torch" or owner.startswith(_NOT_OURS)):
            line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            break
        frame = frame.f_back  # type: ignore[assignment]
    while frame is not None and not module:  # a line of a function: the module around it
        module = _module_that_runs(frame, names or {})
        frame = frame.f_back  # type: ignore[assignment]
    return SourceLine(module, line)


def _module_that_runs(frame: FrameType, names: Mapping[int, str]) -> str:
    """The one whose method a frame is of, in words; empty where it is of none."""
    if not frame.f_code.co_argcount or frame.f_code.co_varnames[0] != "self":
        return ""
    given = frame.f_locals.get("self")
    if not isinstance(given, nn.Module):
        return ""
    name = names.get(id(given))
    return type(given).__name__ if not name else f"{name!r} ({type(given).__name__})"


class AbsentTrace:
    """What is seen of the absent values of one pass. ``names`` of modules by identity; ``advice`` ends every error."""

    def __init__(
        self,
        where: str,
        advice: str,
        names: Mapping[int, str] | None = None,
        error: type[ShardwiseError] = PlanError,
        refuses_edits: bool = False,
    ):
        self.where = where
        self.advice = advice
        self.names = names or {}
        self._error = error
        self.refuses_edits = refuses_edits
        """Whether an edit in place is an error: of what is elsewhere, and would not stay."""
        self.counts = True
        """Whether a meeting with a value that is there is worth remembering."""
        self.refusal: ShardwiseError | None = None
        """The first error, which a model's own ``except`` may have caught."""
        self.trouble: tuple[BaseException, str] | None = None
        """An operation on an absent value that failed, and what the value is."""

    def refuse(self, what: str, done: str, place: SourceLine | None = None) -> NoReturn:
        """``what`` is absent and ``done`` to all the same."""
        place = place or place_of_use(self.names)
        error = self._error(f"{self.where}{what} {done}, {place}. {self.advice}")
        self.refusal = self.refusal or error
        raise error


class Absent(Tensor):
    """See the module's docstring. ``inner`` holds fillers for the numbers; ``what`` is absent, in words."""

    _inner: Tensor
    _what: str
    _watch: AbsentTrace
    _met: SourceLine | None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: Tensor, what: str, watch: AbsentTrace, met: SourceLine | None = None) -> "Absent":
        made: Any = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=inner.device,
        )
        made._inner, made._what, made._watch, made._met = inner, what, watch, met
        return made  # type: ignore[no-any-return]

    def __init__(self, inner: Tensor, what: str, watch: AbsentTrace, met: SourceLine | None = None):
        pass

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _computed(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Absent({self._what}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @property
    def what(self) -> str:
        """What is absent, in words."""
        return self._what.rstrip(",")

    def refuse(self, done: str, place: SourceLine | None = None) -> NoReturn:
        """PlanError: this value is absent and ``done``."""
        self._watch.refuse(self._what, done, place or self._met)

    def tolist(self) -> NoReturn:
        """An error: the numbers are not here."""
        self._watch.refuse(self._what, "is turned into Python numbers (tolist)")

    def numpy(self, *, force: bool = False) -> NoReturn:
        """An error: the numbers are not here."""
        self._watch.refuse(self._what, "is turned into an array (numpy)")

    def __array__(self, dtype: Any = None) -> NoReturn:
        self._watch.refuse(self._what, "is turned into an array (numpy)")

    def _is_read(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._watch.refuse(self._what, "is read past torch's operations")

    # What would look for memory that is not there.
    apply_ = map_ = map2_ = __dlpack__ = data_ptr = untyped_storage = storage = share_memory_ = _is_read  # type: ignore[assignment]

    def __format__(self, how: str) -> str:
        if how:
            self._watch.refuse(self._what, "is turned into a text")
        return repr(self)

    def __deepcopy__(self, memo: Any) -> "Absent":
        return Absent(self._inner.clone(), self._what, self._watch, self._met)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._watch.refuse(self._what, "is saved")


def absent_in(value: Any) -> Absent | None:
    """The first absent tensor in a value: in tuples, lists, mappings and the attributes of plain objects."""
    return _absent_in(value, 0)


def _absent_in(value: Any, depth: int) -> Absent | None:
    if isinstance(value, Absent):
        return value
    if isinstance(value, Tensor | str | bytes | int | float | type | nn.Module | None) or depth > 6:
        return None
    inner: Any = ()
    if isinstance(value, Mapping):
        inner = list(value.values())
    elif isinstance(value, tuple | list | set | frozenset):
        inner = value
    elif hasattr(value, "__dict__") and not callable(value):
        inner = list(vars(value).values())
    for each in inner:
        found = _absent_in(each, depth + 1)
        if found is not None:
            return found
    return None


def present_fill(value: Any) -> Any:
    """``value`` with ordinary tensors in the place of absent ones: what they are filled with."""
    return tree_map(lambda leaf: leaf._inner if isinstance(leaf, Absent) else leaf, value)


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    """One operation of torch that takes at least one absent value."""
    name = func.overloadpacket.__name__
    leaves = tree_leaves((args, kwargs))
    absent = [leaf for leaf in leaves if isinstance(leaf, Absent)]
    first = absent[0]
    watch = first._watch
    _check_conversion(func, name, args, kwargs, first)
    if "batch_norm" in name:  # it writes running statistics without saying so
        args, kwargs = tree_map(_own_copy, (args, kwargs))
    written = _written(func, args, kwargs)
    for target in written:
        if isinstance(target, Tensor) and not isinstance(target, Absent):
            done = f"is written into a tensor of shape {tuple(target.shape)} that is not absent ({name})"
            watch.refuse(first._what, done, first._met)
        if isinstance(target, Absent) and target._watch.refuses_edits:
            target._watch.refuse(target._what, f"is edited in place ({name.rstrip('_')}_)")
    inner_args, inner_kwargs = present_fill((args, kwargs))
    try:
        result = func(*inner_args, **inner_kwargs)
    except Exception as error:
        watch.trouble = watch.trouble or (error, first._what)
        raise
    clean = name in _SHAPE_ONLY or (name in _OTHER_SHAPE and args and not isinstance(args[0], Absent))
    if clean:
        return result
    met = next((each._met for each in absent if each._met is not None), None)
    if met is None and watch.counts:
        present = (leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, Absent))
        if any(leaf.is_floating_point() for leaf in present):
            met = place_of_use(watch.names)
    same = {id(target._inner): target for target in written if isinstance(target, Absent)}

    def marked(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return same.get(id(leaf)) if id(leaf) in same else Absent(leaf, first._what, watch, met)

    if torch.Tag.inplace_view in func.tags:
        watch.refuse(first._what, f"changes its shape in place ({name})")
    return tree_map(marked, result)


def _check_conversion(func: Any, name: str, args: Any, kwargs: Any, first: Absent) -> None:
    """Errors for what makes a number, a truth or a shape of absent numbers."""
    tags, watch = func.tags, first._watch
    if torch.Tag.data_dependent_output in tags or name in (
        "_local_scalar_dense",
        "is_nonzero",
        "equal",
        "item",
    ):
        watch.refuse(first._what, "is turned into a Python number or decides a branch")
    if name in _DECIDES_A_SHAPE:
        watch.refuse(first._what, f"decides a shape ({name})")
    if torch.Tag.dynamic_output_shape not in tags:
        return
    deciding = [leaf for leaf in tree_leaves((args[1:], kwargs)) if isinstance(leaf, Absent)]
    if name == "repeat_interleave" and len(args) == 1:
        deciding = [first]
    if name.startswith("index"):  # of an index, a mask alone has a shape inside
        deciding = [each for each in deciding if each.dtype in (torch.bool, torch.uint8)]
    if deciding:
        watch.refuse(deciding[0]._what, f"decides a shape ({name})")


def _own_copy(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) and not isinstance(leaf, Absent) else leaf


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an operation writes into."""
    if not func._schema.is_mutable:
        return []
    found = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = kwargs.get(argument.name, args[place] if place < len(args) else None)
            found += tree_leaves(given)
    return found


# Parameters --------------------------------------------------------------------------------------------------------


class Withheld:
    """Mixed into the class of a Parameter while its numbers are not here."""

    _told: Callable[[Any], str]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _of_withheld(func, args, kwargs or {})


_READS = _words(
    "size dim ndimension numel nelement element_size stride storage_offset is_contiguous is_floating_point "
    "is_complex is_signed is_conj is_neg is_inference is_shared is_pinned is_tensor is_same_size is_set_to "
    "has_names __len__ __hash__ __repr__ __dir__ data_ptr requires_grad_ retain_grad register_hook "
    "register_post_accumulate_grad_hook get_device grad backward _is_view dim_order"
)
"""Functions and methods that do not look at numbers; ``grad`` and ``backward`` take parameters as names."""
_VALUES = _words("data T mT H mH real imag")
"""Attributes whose reading hands the numbers over."""


def withhold(
    parameters: Sequence[nn.Parameter], told: Callable[[Any], str], classes: dict[type, type]
) -> None:
    """Any use of these numbers is an error from now on, until ``give``.

    ``told(parameter)``: what is absent, and in a second line what to do. ``classes`` keeps those that were made, for
    the same ``told``: a release swaps classes and makes none.
    """
    for parameter in parameters:
        if isinstance(
            parameter, Expected
        ):  # else what comes would show the class of this one, and stay expected
            parameter._arrive()
        own = type(parameter)
        if issubclass(own, Withheld):
            continue
        if own not in classes:
            body = {"_told": staticmethod(told), "__module__": own.__module__, "__doc__": own.__doc__}
            classes[own] = type(own.__name__, (Withheld, own), body)
        parameter.__class__ = classes[own]


class Expected:
    """Mixed into the class of a Parameter while its numbers are on their way."""

    _arrive: Callable[[], None]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if _takes_no_numbers(func, args, kwargs or {}):
                return func(*args, **(kwargs or {}))
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Expected):
                    leaf._arrive()
        return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: Any) -> Any:
        self._arrive()
        return copy.deepcopy(self, memo)  # of the class that it is now


def expect(parameters: Sequence[nn.Parameter], arrive: Callable[[], None], classes: dict[type, type]) -> None:
    """Whoever uses these numbers calls ``arrive`` first, which ends in ``give``. ``classes`` as for ``withhold``."""
    for parameter in parameters:
        own = type(parameter)
        if own not in classes:
            body = {"_arrive": staticmethod(arrive), "__module__": own.__module__, "__doc__": own.__doc__}
            classes[own] = type(own.__name__, (Expected, own), body)
        parameter.__class__ = classes[own]


def give(parameters: Sequence[nn.Parameter]) -> None:
    """End of ``withhold`` and of ``expect``."""
    for parameter in parameters:
        own: Any = type(parameter)
        if issubclass(own, Withheld | Expected):
            parameter.__class__ = own.__mro__[2]


def mix_in(parameters: Sequence[nn.Parameter], mixin: type) -> None:
    """Give ``parameters`` the attributes of ``mixin``; a mark of ``withhold`` or ``expect`` stays in front."""
    _change_classes(parameters, lambda own: type(own.__name__, (mixin, own), _named_as(own)))


def take_out(parameters: Sequence[nn.Parameter], mixin: type) -> None:
    """End ``mix_in`` of ``mixin``, or of a class derived from it."""
    _change_classes(
        parameters,
        lambda own: (
            own.__bases__[1] if len(own.__bases__) == 2 and issubclass(own.__bases__[0], mixin) else own
        ),
    )


def _change_classes(parameters: Sequence[nn.Parameter], change: Callable[[type], type]) -> None:
    """Replace the class of each parameter, under a mark if it has one, by what ``change`` makes of that class."""
    changed: dict[type, type] = {}
    for parameter in parameters:
        own: Any = type(parameter)
        if own not in changed:
            if issubclass(own, Withheld | Expected):
                mark, inner = own.__bases__
                body = {key: value for key, value in vars(own).items() if key in ("_told", "_arrive")}
                changed[own] = type(own.__name__, (mark, change(inner)), body | _named_as(own))
            else:
                changed[own] = change(own)
        parameter.__class__ = changed[own]


def _named_as(own: type) -> dict[str, Any]:
    return {"__module__": own.__module__, "__doc__": own.__doc__}


def _attribute(func: Any) -> str:
    """Of a Parameter that ``func`` reads or writes; empty for another function."""
    is_access = func.__name__ in ("__get__", "__set__", "__delete__")
    return getattr(getattr(func, "__self__", None), "__name__", "") if is_access else ""


def _takes_no_numbers(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call of torch looks at no number of the parameters that it takes."""
    name, attribute = func.__name__, _attribute(func)
    if attribute:
        return attribute not in _VALUES
    return name in _READS or name in _SHAPE_ONLY or (name == "type" and len(args) == 1 and not kwargs)


def _of_withheld(func: Any, args: Any, kwargs: Any) -> Any:
    """A call of torch that takes a withheld parameter."""
    name, attribute = func.__name__, _attribute(func)
    with torch._C.DisableTorchFunctionSubclass():
        if _takes_no_numbers(func, args, kwargs):
            return func(*args, **kwargs)
        first = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Withheld))
        if name in _OTHER_SHAPE and not isinstance(args[0], Withheld):
            return func(*args, **kwargs)
        what, advice = first._told(first).split("\n")
        if name == "detach" or (name == "__get__" and attribute == "data"):
            plain: Any = first
            return Absent(
                Tensor.detach(plain), what, AbsentTrace("", advice, error=UsageError, refuses_edits=True)
            )
    accesses = {"__get__": f"is read ({attribute})", "__set__": f"is replaced ({attribute})"}
    done = accesses.get(name, f"is used by {name}")
    raise UsageError(f"{what} {done}, {place_of_use()}. {advice}")
