"""What one step does on the device, its captured graphs, and its first and last kernels."""
