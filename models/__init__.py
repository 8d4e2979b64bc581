"""Architectures, layers, kernels and weights. Nothing here knows of requests, steps or schedules."""
