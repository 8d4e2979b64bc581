"""Tests of models/kernels."""
