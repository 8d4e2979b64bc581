"""Tests of launch/sweep."""
