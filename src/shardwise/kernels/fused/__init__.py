"""Kernels in Triton, each the second form of a kernel whose plain form defines the result.

``choice.fused`` decides when they are imported, and no earlier: importing Triton takes half a second. Every file has
kernels and, for each, a function that launches it on contiguous tensors. Rules:

- Sums run in an order that only shapes decide, in fp32, and no kernel uses atomics: the same bits in every run.
- Every launch passes ``enable_fp_fusion``. It is False, so that no product and sum are contracted to one rounding, if
  the plain form's bits are guaranteed.
- A block of a row is a power of two and masked: no shape is refused, except those that the launcher's docstring names.

Tests run them in Triton's interpreter and compile them for devices that are not there (tests/kernels/fused). Times and
bits on a real device are not yet measured: benchmarks/kernels.
"""
