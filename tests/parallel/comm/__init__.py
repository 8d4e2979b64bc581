"""Tests of parallel/comm."""
