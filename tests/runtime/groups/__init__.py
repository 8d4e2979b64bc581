"""Tests of runtime/groups."""
