"""Tests of launch/scale."""
