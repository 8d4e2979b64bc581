"""Attention kernels, decode and prefill, and the rotation and KV write in front of them."""
