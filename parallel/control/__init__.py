"""The control plane: how ranks agree on what to run, without NCCL and without torch.

Standard library, msgspec and zmq only. From the bottom up: errors.py (what can go wrong, by name), frames.py (the
wire format), handshake.py and states.py (pure machines), uds.py and zeromq.py (sockets), uds_links.py (those
of one node, by rank), control/interface.py (what the engine holds), leader_plane.py and follower_plane.py (for several
ranks).
"""
