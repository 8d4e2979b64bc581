"""Tests of launch/tune."""
