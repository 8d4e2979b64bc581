"""Everything that touches the device: streams, slot tables, staging, caches, sampling, results."""
