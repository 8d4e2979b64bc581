"""Matrix products of dense layers: GEMV, skinny and wide kernels, cuBLASLt, and which runs when."""
