"""Tests of launch/ranks."""
