"""Tests of runtime/execute/device."""
