"""Eight neighbouring columns of a row as one value of a compiled loop.

    for c in range(0, whole(width), BLOCK):
        put(out, row, c, plus(block(out, row, c), block(grad, i, c)))      # out[row, c:c+8] += grad[i, c:c+8]
    for j in range(whole(width), width):
        out[row, j] += grad[i, j]

numba's compiler takes several columns at a time only in a loop that has more columns than it unrolls, 32 in fp32, and
checks before each row that the arrays do not overlap. A row of 16 columns goes one by one there. A block is a vector of
the compiler's intermediate language, in a register of the processor, so a row of 16 takes two loads and two stores.

Each lane is rounded as the same operation on two numbers is, so a loop over blocks gives the bits of a loop over
columns. ``multiplied_on`` alone may round once for a product and a sum, for loops that no reference holds to the bit.

The last dimension of an array must be contiguous. A block is not checked against the shape of its array.

Shapes: a block has 8 columns of fp32 or fp64.
"""

import functools
from typing import Any

from shardwise.kernels.tables.compiled import Instruction, loop

BLOCK = 8
"""Number of columns of a block."""
_LANES = 4
"""Number of partial sums of ``lanes_of_squares``."""


@functools.cache
def _block_type() -> Any:
    """Return the type of blocks, which numba gets at the first use of a block."""
    from llvmlite import ir
    from numba import types
    from numba.core import datamodel

    class Block(types.Type):  # type: ignore[misc]
        """Several numbers of one dtype, as a value."""

        def __init__(self, dtype: Any, lanes: int) -> None:
            self.dtype, self.lanes = dtype, lanes
            super().__init__(name=f"Block({dtype}, {lanes})")

    class BlockModel(datamodel.PrimitiveModel):  # type: ignore[misc]
        """Vector of the compiler for a block."""

        def __init__(self, models: Any, kind: Any) -> None:
            element = models.lookup(kind.dtype).get_value_type()
            super().__init__(models, kind, ir.VectorType(element, kind.lanes))

    datamodel.register_default(Block)(BlockModel)
    return Block


def _pointer(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    """Return the address of ``array[row, column]``; the first three arguments are these."""
    from numba.core import cgutils, types

    kind = signature.args[0]
    held = context.make_array(kind)(context, builder, arguments[0])
    places = [
        context.cast(builder, value, given, types.intp)
        for value, given in zip(arguments[1:3], signature.args[1:3], strict=True)
    ]
    return cgutils.get_item_pointer(context, builder, kind, held, places)


def _vector(context: Any, kind: Any, lanes: int) -> Any:
    from llvmlite import ir

    return ir.VectorType(context.get_value_type(kind), lanes)


def _spread(context: Any, builder: Any, number: Any, lanes: int) -> Any:
    """Return the vector that has ``number`` in each lane."""
    from llvmlite import ir

    kind, word = ir.VectorType(number.type, lanes), ir.IntType(32)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), number, word(0))
    mask = ir.Constant(ir.VectorType(word, lanes), [0] * lanes)
    return builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), mask)


def _build_block(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    from llvmlite import ir
    from numba.core import types

    kind = signature.args[0].dtype
    at = _pointer(context, builder, signature, arguments)
    at = builder.bitcast(at, _vector(context, kind, BLOCK).as_pointer())
    found = builder.load(at, align=kind.bitwidth // 8)
    if kind != types.uint16:
        return found
    words = ir.VectorType(ir.IntType(32), BLOCK)
    bits = builder.shl(builder.zext(found, words), ir.Constant(words, [16] * BLOCK))
    return builder.bitcast(bits, _vector(context, types.float32, BLOCK))


def _build_put(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    kind = signature.args[0].dtype
    at = _pointer(context, builder, signature, arguments)
    at = builder.bitcast(at, _vector(context, kind, BLOCK).as_pointer())
    builder.store(arguments[3], at, align=kind.bitwidth // 8)
    return context.get_dummy_value()


def _build_each(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    return _spread(context, builder, arguments[0], BLOCK)


def _build_each_at(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    return _spread(context, builder, builder.load(_pointer(context, builder, signature, arguments)), BLOCK)


def _build_multiplied_on(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    total, x, y = arguments
    flags = ("contract",)
    return builder.fadd(total, builder.fmul(x, y, flags=flags), flags=flags)


def _build_lanes_of_squares(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    from llvmlite import ir

    total, x = arguments
    squares, word = builder.fmul(x, x), ir.IntType(32)
    for first in range(0, BLOCK, _LANES):
        mask = ir.Constant(ir.VectorType(word, _LANES), list(range(first, first + _LANES)))
        total = builder.fadd(total, builder.shuffle_vector(squares, squares, mask))
    return total


def _build_lane(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    from numba.core import types

    return builder.extract_element(
        arguments[0], context.cast(builder, arguments[1], signature.args[1], types.int32)
    )


def _of_array(array: Any, *rest: Any) -> Any:
    from numba import types

    return _block_type()(types.float32 if array.dtype == types.uint16 else array.dtype, BLOCK)


def _nothing(*given: Any) -> Any:
    from numba import types

    return types.void


block = Instruction(lambda array, row, column: None, _of_array, _build_block)
"""Columns [column, column + 8) of ``array[row]``; those of uint16 are the upper halves of fp32 numbers."""

put = Instruction(lambda array, row, column, x: None, _nothing, _build_put)
"""Writes a block to columns [column, column + 8) of ``array[row]``."""

each = Instruction(lambda number: None, lambda number: _block_type()(number, BLOCK), _build_each)
"""The block that has a number in each column; the number must have the dtype of the other blocks."""

each_at = Instruction(lambda array, row, column: None, _of_array, _build_each_at)
"""The block that has ``array[row, column]`` in each column."""

plus = Instruction(
    lambda x, y: None,
    lambda x, y: x,
    lambda context, builder, signature, given: builder.fadd(*given),
)
"""The sum of two blocks."""

minus = Instruction(
    lambda x, y: None,
    lambda x, y: x,
    lambda context, builder, signature, given: builder.fsub(*given),
)
"""The difference of two blocks."""

times = Instruction(
    lambda x, y: None,
    lambda x, y: x,
    lambda context, builder, signature, given: builder.fmul(*given),
)
"""The product of two blocks, column by column."""

over = Instruction(
    lambda x, y: None,
    lambda x, y: x,
    lambda context, builder, signature, given: builder.fdiv(*given),
)
"""The quotient of two blocks, column by column."""

multiplied_on = Instruction(lambda total, x, y: None, lambda total, x, y: total, _build_multiplied_on)
"""total + x·y, rounded once or twice."""

no_lanes = Instruction(
    lambda number: None,
    lambda number: _block_type()(number, _LANES),
    lambda context, builder, signature, given: _spread(context, builder, given[0], _LANES),
)
"""Four partial sums that are all the given number."""

lanes_of_squares = Instruction(lambda total, x: None, lambda total, x: total, _build_lanes_of_squares)
"""Four partial sums, with the square of column j of a block added to sum j % 4, in the order of the columns."""

lane = Instruction(lambda total, index: None, lambda total, index: total.dtype, _build_lane)
"""One of four partial sums."""


@loop
def whole(width: int) -> int:
    """Return the number of columns that lie in whole blocks."""
    return width - width % BLOCK
