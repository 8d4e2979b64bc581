"""Streams, events, graphs and memory under one protocol: CUDA, and a CPU twin with the same order."""
