"""`bench serve`: requests that arrive over time, and what became of them."""
