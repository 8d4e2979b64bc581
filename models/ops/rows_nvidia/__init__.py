"""Rows on NVIDIA GPUs: Triton kernels, cuBLAS, FlashInfer. They come before those of rows_reference."""

from models.ops.rows_nvidia import attention, dense, experts, recurrent

ROWS = (*dense.ROWS, *attention.ROWS, *experts.ROWS, *recurrent.ROWS)
INVARIANT_ROWS = (*dense.INVARIANT_ROWS, *attention.INVARIANT_ROWS, *recurrent.INVARIANT_ROWS)  # come before the others
KEYS = dense.KEYS | attention.KEYS | experts.KEYS | recurrent.KEYS
