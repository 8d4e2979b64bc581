"""Tests of runtime/execute/cache."""
