"""Mixers that keep a state of a fixed size for each sequence: references in torch, and Triton kernels."""
