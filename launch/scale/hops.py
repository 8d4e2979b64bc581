"""What each further receiver of a control record costs its sender, measured on this machine, for scale/control.py.

    python -m launch.scale.hops [--near 7] [--far 127] [--turns 300]

Knows: bare Unix sockets and bare ZeroMQ with CURVE, in one process. Does not know: the control plane (bench/control.py
times that, with a process a rank). Microseconds a receiver, median over turns: ``sends``, until the sender is free
again; ``all have it``, until the last receiver has read, which includes encryption by ZeroMQ's own thread.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import zmq
from zmq.auth import CURVE_ALLOW_ANY
from zmq.auth.thread import ThreadAuthenticator

_RECORD = bytes(200)


def near_costs(receivers: int, turns: int) -> tuple[float, float]:
    """Over Unix SOCK_SEQPACKET pairs."""
    with ExitStack() as stack:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(receivers)]
        for pair in pairs:
            for end in pair:
                stack.enter_context(end)
        return _timed(
            turns,
            receivers,
            send=lambda: [near.send(_RECORD) for near, _ in pairs],
            receive=lambda: [far.recv(4096) for _, far in pairs],
        )


def far_costs(receivers: int, turns: int) -> tuple[float, float]:
    """Over one ROUTER and a DEALER a receiver, on loopback TCP with CURVE."""
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        gate = ThreadAuthenticator(context)
        gate.start()
        stack.callback(gate.stop)
        gate.configure_curve(domain="*", location=CURVE_ALLOW_ANY)
        router: zmq.Socket[bytes] = stack.enter_context(context.socket(zmq.ROUTER))
        public, router.curve_secretkey = zmq.curve_keypair()
        router.curve_server = True
        port = router.bind_to_random_port("tcp://127.0.0.1")
        names = [f"{number:05d}".encode() for number in range(receivers)]
        dealers = []
        for name in names:
            dealer: zmq.Socket[bytes] = stack.enter_context(context.socket(zmq.DEALER))
            dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
            dealer.curve_serverkey = public
            dealer.routing_id = name
            dealer.connect(f"tcp://127.0.0.1:{port}")
            dealer.send(b"here")
            dealers.append(dealer)
        for _ in dealers:
            router.recv_multipart()
        return _timed(
            turns,
            receivers,
            send=lambda: [router.send_multipart((name, _RECORD)) for name in names],
            receive=lambda: [dealer.recv() for dealer in dealers],
        )


def _timed(
    turns: int, receivers: int, *, send: Callable[[], object], receive: Callable[[], object]
) -> tuple[float, float]:
    sends, whole = [], []
    for _ in range(turns):
        began = time.perf_counter()
        send()
        sends.append(time.perf_counter() - began)
        receive()
        whole.append(time.perf_counter() - began)
    return 1e6 * statistics.median(sends) / receivers, 1e6 * statistics.median(whole) / receivers


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m launch.scale.hops", description="Cost of a control record.")
    parser.add_argument("--near", type=int, default=7, help="receivers on the same node (default: 7) [ranks]")
    parser.add_argument("--far", type=int, default=127, help="first ranks on other nodes (default: 127) [ranks]")
    parser.add_argument("--turns", type=int, default=300, help="records of each kind (default: 300) [records]")
    options = parser.parse_args(arguments)
    for name, (sends, whole) in (
        (f"near, {options.near} receivers", near_costs(options.near, options.turns)),
        (f"far, {options.far} receivers", far_costs(options.far, options.turns)),
    ):
        print(f"{name:<22} sends {sends:6.2f} us, all have it {whole:6.2f} us, a receiver")


if __name__ == "__main__":
    main()
