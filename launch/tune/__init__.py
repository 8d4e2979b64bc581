"""`launch tune`: measures the kernels of a model's shapes on the GPU at hand, and writes a table for later starts."""
