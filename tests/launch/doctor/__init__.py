"""Tests of launch/doctor."""
