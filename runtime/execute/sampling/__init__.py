"""Sampling: inputs by row, penalties, filters, draws, log-probabilities; torch references and Triton kernels."""
