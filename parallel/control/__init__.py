"""The control plane: how ranks agree on what to run, without NCCL and without torch.

Standard library, msgspec and zmq only. From the bottom up: errors.py (what can go wrong, by name), record.py (the
wire format), handshake.py and agreement.py (pure machines), uds.py and zeromq.py (sockets), plane.py (what the engine
holds).
"""
