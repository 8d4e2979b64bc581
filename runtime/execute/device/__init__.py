"""Streams, events, graphs and memory behind one protocol: CUDA, and a CPU twin with the same order."""
