"""The control plane: how ranks agree on what to run, without NCCL and without torch.

Standard library, msgspec and zmq only. From the bottom up: errors.py (causes and verdicts), wire/ (frames), protocol/
(pure state machines of handshake, leader and follower), transport/ (Unix sockets, ZeroMQ, rendezvous), interface.py
(what an engine holds), leader_plane.py and follower_plane.py (machines driven over sockets), connect.py
(opens all of it).
"""
