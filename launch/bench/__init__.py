"""`launch bench`: latency, throughput, the anatomy of a step, the control plane; results in published schemas."""
