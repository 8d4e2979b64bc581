"""The operations models are written in: one contract (interface.py), one torch reference, faster ones for GPUs."""
