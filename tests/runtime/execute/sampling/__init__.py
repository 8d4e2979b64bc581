"""Tests of runtime/execute/sampling."""
