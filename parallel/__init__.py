"""What ranks share: sharded layers, the collectives between them, and the control plane.

This file imports nothing: Python executes it on the way to parallel.control, which never loads torch.
"""
