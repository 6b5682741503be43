"""Kernels in Triton, each the second form of one whose plain form stands beside it and says what it computes.

Imported where ``choice.fused`` says so, and not before: importing Triton takes half a second. Every file has kernels
and, for each, a function that launches it on contiguous tensors. Rules:

- sums run in an order that only shapes decide, in fp32, and no kernel uses atomics: the same bits in every run
- ``enable_fp_fusion`` is said at every launch: False, no product and sum contracted to one rounding, where the plain
  form's bits are promised
- a block of a row is a power of two and masked: no shape is refused but those whose launcher says so

Tests run them in Triton's interpreter and compile them for devices that are not there (tests/kernels/fused). Times and
bits on a real device are not yet measured: benchmarks/kernels.
"""
