"""Everything that touches the device: streams, slot tables, staging, the KV pool, sampling, landing."""
