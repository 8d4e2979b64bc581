"""Tests of runtime/replicate."""
