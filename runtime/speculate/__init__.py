"""Speculation: what proposes the tokens of a window. proposer.py is the interface, each other file one proposer."""
