"""What requests keep on the device while they run, besides the KV cache."""
