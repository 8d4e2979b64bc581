"""`daemon`: sessions for local clients over a Unix socket, or for a parent over its descriptors."""
