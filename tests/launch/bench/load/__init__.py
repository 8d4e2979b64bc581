"""Tests of launch/bench."""
