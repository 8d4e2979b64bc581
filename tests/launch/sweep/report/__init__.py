"""Tests of launch/sweep/report."""
