"""One file a model family: its layers, and how its checkpoints name them."""
