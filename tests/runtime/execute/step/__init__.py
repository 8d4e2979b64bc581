"""Tests of runtime/execute/step."""
