"""Layers that own their shard: which slice of a weight a rank holds and how it is loaded."""
