"""Proposers: each by itself, and in engines whose answers must not change."""
