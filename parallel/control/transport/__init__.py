"""Transports of frames: Unix sockets inside a node, ZeroMQ between nodes, and the rendezvous over each."""
