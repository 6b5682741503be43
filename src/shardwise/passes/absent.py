"""Absent values: tensors of the right shape whose numbers are elsewhere, and the operations that they allow.

A stage runs the whole model's forward pass with stand-ins for parts on other stages, and at ZeRO stage 3 a weight is in
memory only while its Unit runs. A result may be built around such a value (its shape, dtype and device are right) as
long as none of its numbers is used. Three marks check that:

    absent     a tensor whose numbers no code has. A result computed from it is absent again and records its
               origin, through comparisons, argmax, nan_to_num and custom functions too: the mark works below autograd,
               in torch's dispatcher, and has no memory that could be read past it
    withhold   a Parameter whose numbers are not in memory now: any use of them is an error on the spot, and so is a
               replacement (``p.data = ...``), which would be lost. The mark is the Parameter's class
    expect     a Parameter whose numbers are in flight: code that uses them waits first

    operation on absent tensors or withheld Parameters    result
    shape, dtype, device, zeros_like, new_ones ...        an ordinary value, which contains nothing of the numbers
    bool(), item(), nonzero(), a write into a tensor      an error on the spot

An error names the absent value, the module whose forward used it, and the line of the model's source.

Cost: an operation on an absent tensor takes Python's time (tens of microseconds), so stages make such tensors only in
the first pass of each kind; ``withhold`` costs a quarter of a microsecond per parameter and release. Operations on
values that are in memory cost nothing extra.
"""

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from shardwise.base.errors import PlanError, ShardwiseError, UsageError


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SHAPE_ONLY = _words(
    "zeros_like ones_like empty_like full_like rand_like randn_like randint_like empty_permuted new_zeros "
    "new_ones new_empty new_full new_tensor new_empty_strided result_type"
)
"""Operations whose result contains nothing of the numbers."""
_OTHER_SHAPE = _words("type_as view_as expand_as reshape_as to sum_to_size is_same_size to_copy _to_copy")
"""Operations that use only the shape or dtype of a second tensor."""
_DECIDES_A_SHAPE = _words("nonzero nonzero_numpy unique_dim unique_consecutive _unique _unique2 bincount")
_NOT_OURS = (
    "torch.",
    "shardwise.memory.",
    "shardwise.passes.",
    "shardwise.tiers.",
    "shardwise.base.",
    "shardwise.parallel.",
    "shardwise.engine.",
    "shardwise.compose.",
    "shardwise.plan.",
)


class SourceLine(NamedTuple):
    """Place in a model's source."""

    module: str
    """Name of the module whose forward runs; empty outside of all modules."""
    line: str
    """``file:line``; empty if no line of the model's is known."""

    def __str__(self) -> str:
        inside = (
            f"in the forward pass of {self.module}"
            if self.module
            else "outside of every module's forward pass"
        )
        return f"{inside}, at {self.line}" if self.line else inside


def place_of_use(names: Mapping[int, str] | None = None) -> SourceLine:
    """Return the innermost running line that is neither torch's nor ours, and the innermost running module.

    Args:
        names: Names of modules by identity; other modules are named by their class.

    Returns:
        The place.
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
    """Return the name of the module whose method a frame runs, or "" if the frame runs no such method."""
    if not frame.f_code.co_argcount or frame.f_code.co_varnames[0] != "self":
        return ""
    given = frame.f_locals.get("self")
    if not isinstance(given, nn.Module):
        return ""
    name = names.get(id(given))
    return type(given).__name__ if not name else f"{name!r} ({type(given).__name__})"


class AbsentTrace:
    """Records of the absent values of one pass, and the text of errors about them.

    Args:
        where: Beginning of every error.
        advice: Last sentence of every error.
        names: Names of modules by identity.
        error: Class of the errors.
        refuses_edits: True if an edit in place is an error.
    """

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
        """True if an edit in place is an error, because it would be lost."""
        self.counts = True
        """True if operations that combine absent and present values are recorded."""
        self.refusal: ShardwiseError | None = None
        """The first error, which a model's own ``except`` may have caught."""
        self.trouble: tuple[BaseException, str] | None = None
        """An operation on an absent value that failed, and the description of the value."""

    def refuse(self, what: str, done: str, place: SourceLine | None = None) -> NoReturn:
        """Raise the error about a use of an absent value.

        Args:
            what: Description of the absent value.
            done: The use, as a verb phrase.
            place: Place of the use, or None for the running line.
        """
        place = place or place_of_use(self.names)
        error = self._error(f"{self.where}{what} {done}, {place}. {self.advice}")
        self.refusal = self.refusal or error
        raise error


class AbsentTensor(Tensor):
    """A tensor whose numbers are elsewhere.

    Args:
        inner: Tensor of the same shape with fillers in place of the numbers.
        what: Description of the value in errors.
        watch: Trace of the pass.
        met: Place where the value was first combined with a present value, or None.
    """

    _inner: Tensor
    _what: str
    _watch: AbsentTrace
    _met: SourceLine | None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, inner: Tensor, what: str, watch: AbsentTrace, met: SourceLine | None = None
    ) -> "AbsentTensor":
        """Make the tensor with the shape, dtype and device of ``inner``."""
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
        """Description of the absent value."""
        return self._what.rstrip(",")

    def refuse(self, done: str, place: SourceLine | None = None) -> NoReturn:
        """Raise the error that this value is absent.

        Args:
            done: The use, as a verb phrase.
            place: Place of the use, or None for the running line.
        """
        self._watch.refuse(self._what, done, place or self._met)

    def tolist(self) -> NoReturn:
        """Raise an error, because the numbers are elsewhere."""
        self._watch.refuse(self._what, "is turned into Python numbers (tolist)")

    def numpy(self, *, force: bool = False) -> NoReturn:
        """Raise an error, because the numbers are elsewhere.

        Args:
            force: Not used.
        """
        self._watch.refuse(self._what, "is turned into an array (numpy)")

    def __array__(self, dtype: Any = None) -> NoReturn:
        self._watch.refuse(self._what, "is turned into an array (numpy)")

    def _is_read(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._watch.refuse(self._what, "is read past torch's operations")

    # Methods that would read memory that does not exist.
    apply_ = map_ = map2_ = __dlpack__ = data_ptr = untyped_storage = storage = share_memory_ = _is_read  # type: ignore[assignment]

    def __format__(self, how: str) -> str:
        if how:
            self._watch.refuse(self._what, "is turned into a text")
        return repr(self)

    def __deepcopy__(self, memo: Any) -> "AbsentTensor":
        return AbsentTensor(self._inner.clone(), self._what, self._watch, self._met)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._watch.refuse(self._what, "is saved")


def absent_in(value: Any) -> AbsentTensor | None:
    """Return the first absent tensor in a value.

    Args:
        value: Any value; tuples, lists, sets, mappings and attributes of plain objects are searched.

    Returns:
        The tensor, or None.
    """
    return _absent_in(value, 0)


def _absent_in(value: Any, depth: int) -> AbsentTensor | None:
    if isinstance(value, AbsentTensor):
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
    """Return ``value`` with ordinary tensors of fillers in place of absent tensors."""
    return tree_map(lambda leaf: leaf._inner if isinstance(leaf, AbsentTensor) else leaf, value)


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    """Run one operation of torch that takes at least one absent value."""
    name = func.overloadpacket.__name__
    leaves = tree_leaves((args, kwargs))
    absent = [leaf for leaf in leaves if isinstance(leaf, AbsentTensor)]
    first = absent[0]
    watch = first._watch
    _check_conversion(func, name, args, kwargs, first)
    if "batch_norm" in name:  # writes running statistics, which its schema does not declare
        args, kwargs = tree_map(_own_copy, (args, kwargs))
    written = _written(func, args, kwargs)
    for target in written:
        if isinstance(target, Tensor) and not isinstance(target, AbsentTensor):
            done = f"is written into a tensor of shape {tuple(target.shape)} that is not absent ({name})"
            watch.refuse(first._what, done, first._met)
        if isinstance(target, AbsentTensor) and target._watch.refuses_edits:
            target._watch.refuse(target._what, f"is edited in place ({name.rstrip('_')}_)")
    inner_args, inner_kwargs = present_fill((args, kwargs))
    try:
        result = func(*inner_args, **inner_kwargs)
    except Exception as error:
        watch.trouble = watch.trouble or (error, first._what)
        raise
    clean = name in _SHAPE_ONLY or (name in _OTHER_SHAPE and args and not isinstance(args[0], AbsentTensor))
    if clean:
        return result
    met = next((each._met for each in absent if each._met is not None), None)
    if met is None and watch.counts:
        present = (leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, AbsentTensor))
        if any(leaf.is_floating_point() for leaf in present):
            met = place_of_use(watch.names)
    same = {id(target._inner): target for target in written if isinstance(target, AbsentTensor)}

    def marked(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return same.get(id(leaf)) if id(leaf) in same else AbsentTensor(leaf, first._what, watch, met)

    if torch.Tag.inplace_view in func.tags:
        watch.refuse(first._what, f"changes its shape in place ({name})")
    return tree_map(marked, result)


def _check_conversion(func: Any, name: str, args: Any, kwargs: Any, first: AbsentTensor) -> None:
    """Raise an error if an operation makes a number, a truth value or a shape from absent numbers."""
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
    deciding = [leaf for leaf in tree_leaves((args[1:], kwargs)) if isinstance(leaf, AbsentTensor)]
    if name == "repeat_interleave" and len(args) == 1:
        deciding = [first]
    if name.startswith("index"):  # only the numbers of a mask determine a shape, not those of an index
        deciding = [each for each in deciding if each.dtype in (torch.bool, torch.uint8)]
    if deciding:
        watch.refuse(deciding[0]._what, f"decides a shape ({name})")


def _own_copy(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) and not isinstance(leaf, AbsentTensor) else leaf


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that an operation writes into."""
    if not func._schema.is_mutable:
        return []
    found = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = kwargs.get(argument.name, args[place] if place < len(args) else None)
            found += tree_leaves(given)
    return found


# Parameters --------------------------------------------------------------------------------------------------------


class WithheldParameter:
    """Mixin for the class of a Parameter while its numbers are not in memory."""

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
"""Functions and methods that do not read numbers; ``grad`` and ``backward`` take parameters as names."""
_VALUES = _words("data T mT H mH real imag")
"""Attributes that return the numbers."""


def withhold(
    parameters: Sequence[nn.Parameter], told: Callable[[Any], str], classes: dict[type, type]
) -> None:
    """Make any use of the parameters' numbers an error until ``give``.

    Args:
        parameters: The parameters.
        told: Function that returns the description of a parameter and, in a second line, the advice of the
            error.
        classes: Cache of the classes made for this ``told``, so that a release swaps classes and makes none.
    """
    for parameter in parameters:
        own = type(parameter)
        made = classes.get(own)
        if made is not None:
            parameter.__class__ = made
            continue
        if isinstance(parameter, ExpectedParameter):
            # Wait first: else the arrival would find the withheld class, and the parameter would stay expected.
            parameter._arrive()
            own = type(parameter)
        if issubclass(own, WithheldParameter):
            continue
        if own not in classes:
            body = {"_told": staticmethod(told), "__module__": own.__module__, "__doc__": own.__doc__}
            classes[own] = type(own.__name__, (WithheldParameter, own), body)
        parameter.__class__ = classes[own]


class ExpectedParameter:
    """Mixin for the class of a Parameter while its numbers are in flight."""

    _arrive: Callable[[], None]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if _takes_no_numbers(func, args, kwargs or {}):
                return func(*args, **(kwargs or {}))
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, ExpectedParameter):
                    leaf._arrive()
        return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: Any) -> Any:
        self._arrive()
        return copy.deepcopy(self, memo)  # ``_arrive`` has restored the plain class


def expect(parameters: Sequence[nn.Parameter], arrive: Callable[[], None], classes: dict[type, type]) -> None:
    """Make every use of the parameters' numbers wait until ``give``.

    Args:
        parameters: The parameters.
        arrive: Function that a use calls first, and that calls ``give``.
        classes: Cache of the classes made for this ``arrive``.
    """
    for parameter in parameters:
        own = type(parameter)
        if own not in classes:
            body = {"_arrive": staticmethod(arrive), "__module__": own.__module__, "__doc__": own.__doc__}
            classes[own] = type(own.__name__, (ExpectedParameter, own), body)
        parameter.__class__ = classes[own]


_MARKED = (WithheldParameter, ExpectedParameter)


def give(parameters: Sequence[nn.Parameter]) -> None:
    """End ``withhold`` and ``expect`` for these parameters."""
    plain = nn.Parameter
    for parameter in parameters:
        own: Any = type(parameter)
        if own is not plain and issubclass(own, _MARKED):
            parameter.__class__ = own.__mro__[2]


def mix_in(parameters: Sequence[nn.Parameter], mixin: type) -> None:
    """Add the attributes of a class to parameters; a mark of ``withhold`` or ``expect`` stays in front.

    Args:
        parameters: The parameters.
        mixin: The class.
    """
    _change_classes(parameters, lambda own: type(own.__name__, (mixin, own), _named_as(own)))


def take_out(parameters: Sequence[nn.Parameter], mixin: type) -> None:
    """End ``mix_in`` for these parameters.

    Args:
        parameters: The parameters.
        mixin: The class that was mixed in, or a base class of it.
    """
    _change_classes(
        parameters,
        lambda own: (
            own.__bases__[1] if len(own.__bases__) == 2 and issubclass(own.__bases__[0], mixin) else own
        ),
    )


def _change_classes(parameters: Sequence[nn.Parameter], change: Callable[[type], type]) -> None:
    """Replace the class of each parameter, below a mark if there is one, by the result of ``change``."""
    changed: dict[type, type] = {}
    for parameter in parameters:
        own: Any = type(parameter)
        if own not in changed:
            if issubclass(own, WithheldParameter | ExpectedParameter):
                mark, inner = own.__bases__
                body = {key: value for key, value in vars(own).items() if key in ("_told", "_arrive")}
                changed[own] = type(own.__name__, (mark, change(inner)), body | _named_as(own))
            else:
                changed[own] = change(own)
        parameter.__class__ = changed[own]


def _named_as(own: type) -> dict[str, Any]:
    return {"__module__": own.__module__, "__doc__": own.__doc__}


def _attribute(func: Any) -> str:
    """Return the name of the attribute that ``func`` reads or writes, or "" for another function."""
    is_access = func.__name__ in ("__get__", "__set__", "__delete__")
    return getattr(getattr(func, "__self__", None), "__name__", "") if is_access else ""


def _takes_no_numbers(func: Any, args: Any, kwargs: Any) -> bool:
    """Return True if a call of torch reads no number of its parameters."""
    name, attribute = func.__name__, _attribute(func)
    if attribute:
        return attribute not in _VALUES
    return name in _READS or name in _SHAPE_ONLY or (name == "type" and len(args) == 1 and not kwargs)


def _of_withheld(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a call of torch that takes a withheld parameter, or raise the error."""
    name, attribute = func.__name__, _attribute(func)
    with torch._C.DisableTorchFunctionSubclass():
        if _takes_no_numbers(func, args, kwargs):
            return func(*args, **kwargs)
        first = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, WithheldParameter))
        if name in _OTHER_SHAPE and not isinstance(args[0], WithheldParameter):
            return func(*args, **kwargs)
        what, advice = first._told(first).split("\n")
        if name == "detach" or (name == "__get__" and attribute == "data"):
            plain: Any = first
            return AbsentTensor(
                Tensor.detach(plain), what, AbsentTrace("", advice, error=UsageError, refuses_edits=True)
            )
    accesses = {"__get__": f"is read ({attribute})", "__set__": f"is replaced ({attribute})"}
    done = accesses.get(name, f"is used by {name}")
    raise UsageError(f"{what} {done}, {place_of_use()}. {advice}")
