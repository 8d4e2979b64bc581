"""Data-parallel groups: who gets a request, what groups agree on each step, outputs brought together."""
