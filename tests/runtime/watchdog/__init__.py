"""Tests of runtime/watchdog."""
