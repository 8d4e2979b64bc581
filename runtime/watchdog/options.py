"""What a watchdog is given of its job: how long to wait for what, and where to leave things.

Knows: the times and their defaults. Does not know: what is done when one of them is over (watchdog.py, shutdown.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class WatchdogOptions:
    """Times in seconds. ``limit``: longest time without progress while running (phases may allow more).

    ``silence``: a rank without a sign for so long counts as stopped once the job stands still.
    ``explanation_wait``: how long a report that may be a consequence waits for its cause. ``grace``: what other
    processes get for their last words. ``held``: a C call may hold the interpreter for this long beyond the limit.

    ``bundles``: the job's own folder for the bundles, removed again when that is nothing. ``parent``: the
    folder that jobs share, removed with the last of them. ``whole_process``: the process is this rank's alone, so that
    its signals are, too (shutdown.py).
    """

    bundles: Path
    parent: Path | None = None
    whole_process: bool = False
    limit: float = 10.0
    interval: float = 0.25
    silence: float = 2.0
    explanation_wait: float = 0.75
    grace: float = 1.5
    held: float = 30.0
