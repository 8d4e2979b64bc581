"""Memory of sequences on the device: what each layer declares, sizing, and the tensors."""
