"""Benchmarks of kernels and of parts on a GPU, and the runner that records them."""
