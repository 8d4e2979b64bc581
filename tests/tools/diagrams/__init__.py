"""The parts of the documents that are drawn from code: `make diagram` redraws them."""
