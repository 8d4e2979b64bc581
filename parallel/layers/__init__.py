"""Parallel layers: each owns its shard arithmetic and how its shard is loaded."""
