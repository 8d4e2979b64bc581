"""Tests of runtime/frontend."""
