"""Memory and operations of one pass of a model, measured without its numbers.

The model runs forward and backward once on tensors that have shapes and no memory. Each storage is counted from its
creation to its end, and each product by its shapes. So the measurement includes what autograd saves, what recomputation
and tiles avoid saving, and temporary memory, for any model, without formulas that repeat the code.

A pass is counted by Unit. A Unit's share runs from the start of its forward (backward) to the start of the next Unit's:

    rise    the most that is held in it, over what was held when it began
    net     what is held when it ends, over the same; positive if a forward pass leaves memory for the backward pass

so the passes of several microbatches, of any order, add up (``timeline.py``).

A stage of a pipeline has a pass of its own: its input is held beside it, its output is released. Experts get as many
rows as a router that chooses evenly would send (parallel/expert/row_counts.py).
For a block, the pass also counts how much of what autograd saves in it is alike on all ranks of "tp"
(tiers/alike.py).

Only two Units of one kind (blocks, for example) run; the others return their input, and get the second one's share.

Cost: a pass of operations on shapes, some 100 µs each, whatever their size and however many blocks there are. Memory
that an operation allocates and frees inside itself is not counted, nor an allocator's rounding.
"""

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from shardwise.base.errors import UsageError
from shardwise.base.hardware import Product
from shardwise.base.pytree import rebuilt, tensors_in
from shardwise.kernels.choice import fused
from shardwise.kernels.deferred import ProductQueue
from shardwise.kernels.dropout import dropped_by
from shardwise.models.dropout import KeyedDropout
from shardwise.observe.flops import is_repeated
from shardwise.parallel.embedding.calls import GroupLoad
from shardwise.plan.action import Kind
from shardwise.simulate.exchanges import ExchangeCall, ExchangeRecord, united
from shardwise.simulate.lookups import strip_tables
from shardwise.simulate.storages import (
    LiveBytes,
    StorageCounts,
    StorageOrigin,
    added,
    bytes_of_counts,
    composition,
    line_of_error,
)
from shardwise.simulate.work import NO_WORK, Work, WorkCounter
from shardwise.tiers.activations import SMALL_BYTES
from shardwise.tiers.alike import AlikeStorages, Key, key_of

_NEEDS_NUMBERS = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)


class NeedsNumbersError(UsageError):
    """The pass of a model depends on the values of its tensors, so shapes are not enough to measure it."""


class UnitPass(NamedTuple):
    """Memory and operations of one Unit in a pass; see the module's docstring."""

    rise_bytes: int
    net_bytes: int
    flops: int
    """FLOPs that were executed, including recomputation."""
    touched_bytes: int = 0
    """Bytes read and written by operations other than products."""
    exchanges: tuple[ExchangeCall, ...] = ()
    """Exchanges with other ranks inside the pass: of modules that are cut along "tp" and "ep", of the loss over a cut
    vocabulary, and of batch norm over all ranks."""
    work: Work = NO_WORK
    """Operations, by class."""
    rise: StorageCounts = {}
    """Composition of ``rise_bytes``."""
    net: StorageCounts = {}
    """Composition of ``net_bytes``."""
    late: StorageCounts | None = None
    """Composition of the most that is held from the first gradient of a parameter on; None without a gradient."""

    @property
    def sent_bytes(self) -> int:
        """Bytes that the exchanges send."""
        return sum(call.bytes for call in self.exchanges)

    @property
    def products(self) -> Mapping[Product, int]:
        """Number of products of each class."""
        return self.work.products

    @property
    def calls(self) -> int:
        """Number of operations that read or write memory."""
        return self.work.calls

    def then(self, later: "UnitPass") -> "UnitPass":
        """Return both shares as one, with ``later`` after this."""
        is_later = self.net_bytes + later.rise_bytes > self.rise_bytes
        return UnitPass(
            max(self.rise_bytes, self.net_bytes + later.rise_bytes),
            self.net_bytes + later.net_bytes,
            self.flops + later.flops,
            self.touched_bytes + later.touched_bytes,
            united((*self.exchanges, *later.exchanges)),
            work=self.work.then(later.work),
            rise=added(self.net, later.rise) if is_later else self.rise,
            net=added(self.net, later.net),
            late=self._late_with(later),
        )

    def _late_with(self, later: "UnitPass") -> StorageCounts | None:
        if self.late is None:
            return None if later.late is None else added(self.net, later.late)
        behind = added(self.net, later.rise)
        return behind if bytes_of_counts(behind) > bytes_of_counts(self.late) else self.late

    @property
    def let_go_bytes(self) -> int:
        """Bytes of storages of earlier shares that have ended when the share holds most."""
        return -sum(origin.nbytes * count for origin, count in self.rise.items() if count < 0)


NOTHING = UnitPass(0, 0, 0)
"""Share of a Unit that did not run."""


class MeasuredPass(NamedTuple):
    """Forward and backward of one microbatch in one stage."""

    shares: Mapping[tuple[Kind, str], UnitPass]
    """Shares by (F or B, name of the Unit); I and W in place of B if the backward pass has two parts."""
    batch_bytes: int
    received_bytes: int = 0
    """Bytes of the input from the stage before, which stays until its backward pass is over."""
    answered_bytes: int = 0
    """Bytes of the gradients that come back for the output to the next stage."""
    alike_sizes: Mapping[str, tuple[int, ...]] = {}
    """Bytes of each storage that autograd saves in a block and that is alike on all ranks of "tp", by name of the
    block."""
    leaves: tuple[ExchangeCall, ...] = ()
    """The message to the next stage."""
    answered: tuple[ExchangeCall, ...] = ()
    """The message with the gradients that come back for it."""
    brings_parts: bool = False
    """True if the ranks of a pipeline may bring parts of batches, whose rows they tell one another before a step."""
    lookups: Mapping[str, tuple[GroupLoad, ...]] = {}
    """Groups of tables with their numbers of keys, by name of the collection."""
    kinds: Mapping[str, str] = {}
    """First Unit that is alike, by name of each Unit."""
    evaluated: Mapping[str, UnitPass] = {}
    """Shares of a forward pass without gradients, in evaluation mode, by name of the Unit."""
    sampled: Mapping[str, UnitPass] = {}
    """Shares of a pass that fills a cache of keys and chooses a token, by name of the Unit; empty without a sample."""

    def renamed(self, names: Mapping[str, str]) -> "MeasuredPass":
        """Return the pass of a stage that is alike, whose Units have other names.

        Args:
            names: Names of the other stage's Units by names of this stage's.
        """
        first = {old: names.get(old, old) for old in {*names, *self.kinds.values()}}

        def rename(name: str) -> str:
            own = next((old for old in names if name == old or (old and name.startswith(f"{old}."))), None)
            return name if own is None else names[own] + name.removeprefix(own)

        def counts(given: StorageCounts) -> StorageCounts:
            return {
                origin._replace(unit=first.get(origin.unit, origin.unit)): n for origin, n in given.items()
            }

        def share(given: UnitPass) -> UnitPass:
            late = None if given.late is None else counts(given.late)
            return given._replace(rise=counts(given.rise), net=counts(given.net), late=late)

        return self._replace(
            shares={(kind, rename(name)): share(each) for (kind, name), each in self.shares.items()},
            evaluated={rename(name): share(each) for name, each in self.evaluated.items()},
            sampled={rename(name): share(each) for name, each in self.sampled.items()},
            alike_sizes={rename(name): sizes for name, sizes in self.alike_sizes.items()},
            kinds={names.get(name, name): first[like] for name, like in self.kinds.items()},
        )

    @property
    def alike_bytes(self) -> Mapping[str, int]:
        """Bytes of the storages of ``alike_sizes``, by name of the block."""
        return {name: sum(sizes) for name, sizes in self.alike_sizes.items()}

    @property
    def flops(self) -> int:
        """FLOPs of all Units."""
        return sum(share.flops for share in self.shares.values())

    def of(self, kind: Kind, unit: str) -> UnitPass:
        """Return the share of a Unit; zeros for a Unit that did not run.

        I of a backward pass that was measured as a whole has all of it, and B of one in two parts has both.
        """
        share = self.shares.get((kind, unit))
        if share is None and kind is Kind.I:
            share = self.shares.get((Kind.B, unit))
        elif share is None and kind is Kind.B and (Kind.I, unit) in self.shares:
            share = self.shares[Kind.I, unit].then(self.shares.get((Kind.W, unit), NOTHING))
        return NOTHING if share is None else share


class LaterProducts:
    """The products of one measured pass that wait for W.

    Args:
        queue: The queue, which the layers of the module have.
        parameters: Unit of each parameter whose gradient waits, by name, in the order of the Units.
    """

    def __init__(self, queue: ProductQueue, parameters: Mapping[nn.Parameter, str]) -> None:
        self._queue = queue
        self._units = list(dict.fromkeys(parameters.values()))
        queue.own({parameter: self._units.index(unit) for parameter, unit in parameters.items()})

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Let products wait inside the ``with`` block."""
        self._queue.open(0)
        try:
            yield
        finally:
            self._queue.close()

    def takes(self, parameter: Tensor, grad: Tensor) -> bool:
        """Let a gradient that autograd has computed wait for W, and return True, if it is to wait."""
        if not self._queue.is_open or not self._queue.has(parameter):
            return False
        assert isinstance(parameter, nn.Parameter), "gradients are those of parameters"
        self._queue.put(parameter, lambda: grad)
        return True

    def by_unit(self) -> Iterator[tuple[str, Iterator[tuple[nn.Parameter, Tensor]]]]:
        """Yield each Unit that has run, from the last to the first, with the gradients that its W computes."""
        left = set(self._queue.left(0))
        for place in reversed(range(len(self._units))):
            if place in left:
                yield self._units[place], self._queue.take(0, place)


@contextmanager
def without_numbers() -> Iterator[None]:
    """Create tensors with shapes but without memory inside the ``with`` block.

    Other tensors that are used inside are converted to such tensors.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def strip(module: nn.Module, dtype_of: Callable[[str, Tensor], torch.dtype], device: torch.device) -> None:
    """Replace the parameters and buffers of ``module`` by tensors without numbers. Call inside ``without_numbers``.

    Args:
        module: Module whose tensors may lie anywhere.
        dtype_of: Function of (name, tensor) that returns the dtype.
        device: Device of the new tensors.
    """
    made: dict[int, Any] = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for held, is_parameter in ((owner._parameters, True), (owner._buffers, False)):
            for key, tensor in held.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    empty = torch.empty(tensor.shape, dtype=dtype_of(dot + key, tensor), device=device)
                    made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
                    made[id(made[id(tensor)])] = made[id(tensor)]  # for a module that appears twice
                held[key] = made[id(tensor)]
    strip_tables(module)
    for owner in module.modules():
        if isinstance(owner, KeyedDropout):  # draws from numbers in host memory
            owner.forward = _masked  # type: ignore[method-assign]


def stripped(value: Any, device: torch.device) -> Any:
    """Return a pytree with its tensors replaced by tensors without numbers. Call inside ``without_numbers``."""
    if isinstance(value, Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device=device)
    return rebuilt(value, lambda inner: stripped(inner, device))


def _masked(x: Tensor) -> Tensor:
    """Return dropout of ``x`` by operations that keep and touch what the kernel of the target device does."""
    if fused(x):
        return x * 1.0  # one launch each way, which draws the mask again and keeps nothing
    return dropped_by(x, torch.empty(x.shape, dtype=torch.uint8, device=x.device), 1.0)


def measure(
    module: nn.Module,
    units: Mapping[str, Hashable],
    batch: Any,
    forward: Callable[[], Sequence[Tensor]],
    traffic: ExchangeRecord | None = None,
    rehearses: bool = False,
    blocks: Collection[str] = (),
    alike: AlikeStorages | None = None,
    repeats: Callable[[], bool] = is_repeated,
    later: "LaterProducts | None" = None,
) -> tuple[MeasuredPass, list[Tensor]]:
    """Measure one pass of ``module``. Call inside ``without_numbers``.

    Args:
        module: The module.
        units: Kind of each Unit, by name of its module; Units of equal kind are alike.
        batch: The batch, whose bytes are counted.
        forward: Function that runs the forward pass and returns the loss, or the tensors for the next stage.
        traffic: Counter of what is sent inside.
        rehearses: Run a forward pass before that is not counted.
        blocks: Names of Units whose saved tensors may move.
        alike: Recorder of tensors that ranks along "tp" have in common.
        repeats: Function that returns True while a backward pass computes a forward pass again.
        later: The products that wait for W, if the backward pass has two parts, I and W.

    Returns:
        The measured pass, and tensors like those that ``forward`` returned.

    Raises:
        NeedsNumbersError: if the pass depends on numbers.
    """
    if rehearses:
        _rehearse(forward, module)
    live = LiveBytes(records=True)
    live.work = WorkCounter(repeats)
    saved = None if alike is None else _AlikeSavedTensors(alike, set(blocks))
    cuts = _UnitStarts(live, traffic or ExchangeRecord(), units, saved, later)
    handles, plain = cuts.watch_gradients(module), cuts.wrap(module)
    try:
        with live:
            cuts.begin(Kind.F, "")
            ends = forward()
            edges = [get_gradient_edge(tensor) for tensor in ends if tensor.requires_grad]
        like = [torch.empty_like(tensor, requires_grad=tensor.requires_grad) for tensor in ends]
        gradients = [torch.empty_like(tensor) for tensor in ends if tensor.requires_grad]
        del ends  # the output is sent, and stays only if autograd keeps it
        with live:
            cuts.run_backward(edges, gradients)
            del edges  # and with them the gradient for the stage before
            cuts.measure_weights()
    except _NEEDS_NUMBERS as error:
        raise NeedsNumbersError(_why(error, module)) from error
    finally:
        for handle in handles:
            handle.remove()
        for each, before in plain:
            each.forward = before
    size = sum(tensor.nbytes for tensor in tensors_in(batch))
    return MeasuredPass(cuts.by_unit(), size, alike_sizes=cuts.alike_sizes(), kinds=cuts.kinds()), like


def measure_evaluation(
    module: nn.Module, units: Mapping[str, Hashable], forward: Callable[[], Sequence[Tensor]]
) -> tuple[dict[str, UnitPass], list[Tensor]]:
    """Measure one forward pass without gradients, in evaluation mode. Call inside ``without_numbers``.

    Args:
        module: The module.
        units: Kind of each Unit, as for ``measure``.
        forward: Function that runs the forward pass and returns its result.

    Returns:
        Share of each Unit by name, and tensors like those that ``forward`` returned.

    Raises:
        NeedsNumbersError: if the pass depends on numbers.
    """
    live = LiveBytes(records=True)
    cuts = _UnitStarts(live, ExchangeRecord(), units)
    plain, was_training = cuts.wrap(module), module.training
    module.eval()
    try:
        with live, torch.no_grad():
            cuts.begin(Kind.F, "")
            ends = forward()
            cuts.end()
    except _NEEDS_NUMBERS as error:
        raise NeedsNumbersError(_why(error, module)) from error
    finally:
        module.train(was_training)
        for each, before in plain:
            each.forward = before
    return {unit: share for (_, unit), share in cuts.by_unit().items()}, [*map(torch.empty_like, ends)]


def _rehearse(forward: Callable[[], object], module: nn.Module) -> None:
    """Run a forward pass that is not counted."""
    try:
        with LiveBytes():
            forward()
    except _NEEDS_NUMBERS as error:
        raise NeedsNumbersError(_why(error, module)) from error


def _seconds(units: Mapping[str, Hashable]) -> dict[str, str]:
    """Return the second Unit of its kind, by name of each Unit that is the third of its kind or later."""
    alike: dict[Hashable, list[str]] = {}
    for name, kind in units.items():
        alike.setdefault(kind, []).append(name)
    return {name: names[1] for names in alike.values() for name in names[2:]}


def _why(error: Exception, module: nn.Module) -> str:
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    names = {id(each): name or "the model" for name, each in module.named_modules()}
    where = place_of_error(error, names)
    return f"the pass of this model cannot be foreseen from shapes: {text}. What it does depends on its numbers{where}"


def place_of_error(error: Exception, names: Mapping[int, str]) -> str:
    """Return the module in whose forward pass, and the line of a model at which, an error was raised, as words.

    Args:
        error: The error.
        names: Names of modules by identity.
    """
    module, frame = "", None
    trace = error.__traceback__
    while trace is not None:
        given = trace.tb_frame.f_locals.get("self")
        if isinstance(given, nn.Module) and id(given) in names:
            module = f" in the forward pass of {names[id(given)]} ({type(given).__name__})"
        frame, trace = trace.tb_frame, trace.tb_next
    line = line_of_error(error)
    return module + (f", at {line}" if line else "") if frame is not None else ""


def _balanced(
    shares: Mapping[tuple[Kind, str], UnitPass], copied: Collection[str]
) -> dict[tuple[Kind, str], UnitPass]:
    """Return ``shares`` so that the ends of storages have the origins of their creations.

    The shares of ``copied`` Units are those of a Unit that runs beside another kind of Unit, whose storages it ends; in
    a copy these are the storages of the Unit's own kind, of the same sizes.
    """
    total: dict[StorageOrigin, int] = {}
    for share in shares.values():
        total = added(total, share.net)
    spare: dict[int, list[StorageOrigin]] = {}
    for origin, count in total.items():
        spare.setdefault(origin.nbytes, []).extend([origin] * count)
    found = dict(shares)
    for origin, count in total.items():
        for key in [key for key in found if key[1] in copied] if count < 0 else ():
            others, share = spare.get(origin.nbytes, []), found[key]
            if others and share.net.get(origin, 0) < 0:
                other = others.pop()
                moved = {origin: 1, other: -1}
                rise = added(share.rise, moved) if share.rise.get(origin, 0) < 0 else share.rise
                has_late = share.late is not None and share.late.get(origin, 0) < 0
                late = added(share.late or {}, moved) if has_late else share.late
                found[key] = share._replace(rise=rise, net=added(share.net, moved), late=late)
    return found


def _closed(
    shares: Mapping[tuple[Kind, str], UnitPass], copied: Collection[str]
) -> dict[tuple[Kind, str], UnitPass]:
    """Return ``shares`` in which a pass ends all storages that it creates.

    The backward pass of the last block of a stage takes a gradient that lies in no share, because a message brought it,
    and leaves one for the block before. A block in front of it also ends the one that it takes. So each of the
    ``copied`` Units, whose share is that of the last block, ends what the copies would leave.
    """
    found, total = dict(shares), dict[StorageOrigin, int]()
    kind = Kind.I if any(of is Kind.I for of, _ in shares) else Kind.B
    backward = [unit for unit in copied if (kind, unit) in shares]
    for share in shares.values():
        total = added(total, share.net)
    left = {
        origin: -1
        for origin, count in total.items()
        if count == len(backward) and all(shares[kind, unit].net.get(origin, 0) > 0 for unit in backward)
    }
    for unit in backward if left else ():
        share = found[kind, unit]
        found[kind, unit] = share._replace(
            net_bytes=share.net_bytes + bytes_of_counts(left), net=added(share.net, left)
        )
    return found


class _AlikeSavedTensors:
    """Tensors that autograd saves in ``blocks`` and that are alike on all ranks (tiers/activations.py)."""

    def __init__(self, alike: AlikeStorages, blocks: Collection[str]):
        self.sizes: dict[str, tuple[int, ...]] = {}
        """Bytes of each storage by block."""
        self._alike = alike
        self._blocks = blocks

    @contextmanager
    def within(self, unit: str) -> Iterator[None]:
        """Record the tensors that the forward of ``unit`` saves inside the ``with`` block."""
        if unit not in self._blocks or torch._C._autograd._top_saved_tensors_default_hooks(False):
            yield
            return
        seen: dict[Key, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            if tensor.is_leaf and tensor.requires_grad:
                return tensor
            with torch.no_grad():
                self._alike.saved(tensor)
            seen[key_of(tensor)] = tensor.untyped_storage().nbytes()
            return tensor.detach()  # detached, because an output would keep alive the node that saves it

        with self._alike.listening():
            with saved_tensors_hooks(pack, lambda tensor: tensor):
                yield
            self.sizes[unit] = tuple(
                size for key, size in seen.items() if size > SMALL_BYTES and self._alike.knows(key)
            )


class _UnitStarts:
    """Splits a pass at the starts of Units.

    ``units`` maps the names of Units to their kinds; of more than two Units of a kind only two run.
    """

    def __init__(
        self,
        live: LiveBytes,
        traffic: ExchangeRecord,
        units: Mapping[str, Hashable],
        saved: _AlikeSavedTensors | None = None,
        later: "LaterProducts | None" = None,
    ):
        self.backward = Kind.B if later is None else Kind.I
        """Kind of the backward pass that is measured."""
        self._later = later
        seconds = _seconds(units)
        self._units = units
        self._live = live
        self._traffic = traffic
        self._saved = saved
        self._shares: dict[tuple[Kind, str, bool], UnitPass] = {}
        """Shares by (F or B, Unit, whether behind its forward), because the code around a Unit continues behind it."""
        self._passed_over: dict[str, str] = {}
        self._seconds = seconds
        self._first_gradient: int | None = None
        """Place in the log of the first gradient of a parameter in the running share."""
        self._hands_on: set[str] = set()
        """Units whose output has the form of their first input."""
        self._now: tuple[Kind, str, bool] | None = None
        self._then = 0, 0, 0, traffic.mark()
        """Bytes held, FLOPs, bytes touched and calls of exchanges when the running share began."""

    def begin(self, kind: Kind, unit: str, is_behind: bool = False) -> None:
        """Begin the share of a Unit and end the one before."""
        self.end()
        live = self._live
        live.most = live.held
        live.unit = self.first_of_kind(unit)
        live.log.clear()
        self._first_gradient = None
        self._now = kind, unit, is_behind
        self._then = live.held, live.flops, live.touched, self._traffic.mark()
        live.work.take()

    def end(self) -> None:
        """End the running share."""
        if self._now is None:
            return
        live, (held, flops, touched, sent) = self._live, self._then
        share = UnitPass(
            live.most - held,
            live.held - held,
            live.flops - flops,
            live.touched - touched,
            self._traffic.since(sent),
            live.work.take(),
            *composition(live.log),
            self._late_counts(),
        )
        live.log.clear()
        before = self._shares.get(self._now)
        self._shares[self._now] = share if before is None else before.then(share)
        self._now = None

    def watch_gradients(self, module: nn.Module) -> list[Any]:
        """Drop each gradient of a parameter when it arrives, and return the handles of the hooks."""
        trained = [each for each in module.parameters() if each.requires_grad]
        return [each.register_post_accumulate_grad_hook(self.drop_gradient) for each in trained]

    def drop_gradient(self, parameter: Tensor) -> None:
        """Drop a gradient, because the Plan counts the flat buffers of gradients (parallel/zero/gradient.py)."""
        grad, parameter.grad = parameter.grad, None
        if self._later is not None and grad is not None and self._later.takes(parameter, grad):
            return
        if self._first_gradient is None:
            self._first_gradient = len(self._live.log)

    def run_backward(self, edges: Sequence[GradientEdge], gradients: Sequence[Tensor]) -> None:
        """Count the shares of B, or of I if the backward pass has two parts."""
        self.begin(self.backward, "")
        with nullcontext() if self._later is None else self._later.waiting():
            torch.autograd.backward(edges, gradients)  # type: ignore[arg-type]

    def measure_weights(self) -> None:
        """End the last share of a backward pass, and count those of W, if the pass has two parts."""
        self.end()
        for unit, products in () if self._later is None else self._later.by_unit():
            self.begin(Kind.W, unit)
            for parameter, _ in products:
                self.drop_gradient(parameter)
            self.end()

    def _late_counts(self) -> StorageCounts | None:
        """Return the composition of the most that the running share holds from its first gradient on."""
        place, log = self._first_gradient, self._live.log
        if place is None:
            return None
        before = composition(log[:place])[1]
        return added(before, composition(log[place:])[0])

    def by_unit(self) -> dict[tuple[Kind, str], UnitPass]:
        """Return all shares, including those of Units that were passed over.

        Shares inside a Unit count for each Unit that is like it. Code that ran behind the second of such Units, in
        front of the third, counts behind each later one but the last; the last has its own.
        """
        last = {second: name for name, second in self._passed_over.items()}
        found = {
            (kind, unit): share for (kind, unit, is_behind), share in self._shares.items() if not is_behind
        }
        behind = {(kind, unit): share for (kind, unit, is_behind), share in self._shares.items() if is_behind}
        for unit, second in self._passed_over.items():
            for shares in (found, behind):
                for (kind, name), share in list(shares.items()):
                    is_inside = name.startswith(f"{second}.") if second else False
                    is_copied = name == second and (shares is found or unit != last[second])
                    if is_inside or is_copied:
                        shares[kind, unit + name.removeprefix(second)] = share
        for key, share in behind.items():
            found[key] = found[key].then(share)
        inner = [
            unit for second in last for unit in (second, *self._passed_over) if unit not in last.values()
        ]
        return _closed(_balanced(found, inner), inner)

    def alike_sizes(self) -> dict[str, tuple[int, ...]]:
        """Return the bytes of each storage that is alike on all ranks, by block."""
        if self._saved is None:
            return {}
        own = self._saved.sizes
        return own | {unit: own.get(second, ()) for unit, second in self._passed_over.items()}

    def kinds(self) -> dict[str, str]:
        """Return the first Unit that is alike, by name of each Unit."""
        return {name: self.first_of_kind(name) for name in self._units}

    def first_of_kind(self, unit: str) -> str:
        """Return the name of the first Unit that is like ``unit``."""
        kind = self._units.get(unit)
        return next((name for name, other in self._units.items() if other == kind), unit) if unit else unit

    def wrap(self, module: nn.Module) -> list[tuple[Any, Callable[..., Any]]]:
        """Count the shares of the Units of ``module``, and return the modules with their forwards before."""
        found: list[tuple[Any, Callable[..., Any]]] = [
            (each, each.forward) for name, each in module.named_modules() if name in self._units
        ]
        names = {id(each): name for name, each in module.named_modules() if name in self._units}
        for each, forward in found:
            each.forward = self.around(names[id(each)], forward)
        return found

    def around(self, unit: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the forward of a Unit with its share counted.

        The Unit's backward begins when the gradient of an output is available.
        """

        def seen(*args: Any, **kwargs: Any) -> Any:
            second = self._seconds.get(unit)
            if second in self._hands_on:
                self._passed_over[unit] = second
                self.begin(Kind.F, unit, is_behind=True)
                return args[0]
            self.begin(Kind.F, unit)
            with nullcontext() if self._saved is None else self._saved.within(unit):
                output = forward(*args, **kwargs)
            if args and _form(output) == _form(args[0]) != ():
                self._hands_on.add(unit)
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda grad: self._begin_backward(unit))
            self.begin(Kind.F, unit, is_behind=True)
            return output

        return seen

    def _begin_backward(self, unit: str) -> None:
        if self._now != (self.backward, unit, False):
            self.begin(self.backward, unit)


def _form(value: Any) -> tuple[Any, ...]:
    return (value.shape, value.dtype) if isinstance(value, Tensor) else ()
