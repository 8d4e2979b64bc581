"""Tests of launch/api."""
