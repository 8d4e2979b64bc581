"""`launch doctor`: what this machine offers, what is wrong with it, and what to type."""
