"""Communication between GPUs: collectives over NCCL or gloo, and kernels over symmetric memory."""
