"""`launch bench`: latency, throughput and load of an engine; results in published schemas."""
