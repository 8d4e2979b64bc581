"""Kernels of routed experts: routing, grouped and streamed matrix products, tile choice."""
