"""Sockets that carry frames: Unix sockets in a node, ZeroMQ between nodes, and how ranks join."""
