"""Proposers: drafters of speculative windows, one a file. Their interface is runtime/execute/proposer.py."""
