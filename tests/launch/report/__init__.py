"""Tests of launch/report."""
