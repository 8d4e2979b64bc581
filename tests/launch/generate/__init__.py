"""Tests of launch/generate."""
