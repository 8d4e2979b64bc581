"""Proposers: who guesses the tokens of windows, one a file. Their interface is runtime/execute/proposer.py."""
