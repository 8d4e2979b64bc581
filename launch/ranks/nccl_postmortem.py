"""What torch.distributed knows when a job fails: its flight recorder's trace, and the end of its communicators.

Knows: torch's recorder of collectives (NCCL's, and gloo's in recent versions), how groups are aborted.
Does not know: who calls it and why (runtime/watchdog/shutdown.py), the engine's own log of calls
(parallel/comm/call_log.py).
"""

from __future__ import annotations

import os
import threading
from collections.abc import MutableMapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

RECORDED_CALLS = 2000  # of each rank: some 30 steps of a large model; a captured graph records its own only once
TRACE = "flight-recorder.json"


def record_collectives(environ: MutableMapping[str, str] = os.environ) -> None:
    """Before the process group is made: keep a ring of the last calls, unless ``environ`` says otherwise."""
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in environ:  # the older name of the same, of which torch complains
        environ.setdefault("TORCH_FR_BUFFER_SIZE", str(RECORDED_CALLS))


def write_flight_recorder(folder: Path) -> None:
    """Write the recorder's calls to ``folder``/flight-recorder.json: sequence numbers, shapes, states, times in ns.

    Nothing where torch has no recorder, or no group. JSON; never its pickled form. NCCL's calls are recorded apart, and
    a torch that could use NCCL has both recorders also where gloo carries everything.
    """
    if not dist.is_initialized():
        return
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json" if _uses_nccl() else "_dump_fr_trace_json", None)
    if dump is not None:
        (folder / TRACE).write_bytes(dump())


def abort_groups(wait_s: float = 1.0) -> bool:
    """End every communicator from this side, so that no kernel of ours waits for a peer. Whether that came to an end.

    An abort may hang as the call that it ends did: it runs in another thread, which is given up after ``wait_s``.
    Only NCCL can be aborted; with gloo alone there is nothing to do, since its calls end with their process.
    """
    if not dist.is_initialized() or not _uses_nccl():
        return True
    aborter = threading.Thread(target=distributed_c10d._abort_process_group, name="abort-groups", daemon=True)
    aborter.start()
    aborter.join(wait_s)
    return not aborter.is_alive()


def _uses_nccl() -> bool:
    return dist.is_nccl_available() and "nccl" in dist.get_backend_config()
