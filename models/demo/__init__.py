"""The embedded checkpoint and how it was made: a small Qwen3 that writes Python.

Knows: where its files stand (this folder is a Hugging Face model folder) and how to train them again.
Does not know: the runtime. Nothing here is imported when a model is served; the files are read like anybody's.
"""
