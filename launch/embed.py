"""`open_engine`: this rank's engine for a Python program, alone or under torchrun and srun.

Knows: where ranks meet, and how a program's own end becomes the job's. Does not know: what is asked of the engine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from launch.ranks import start_engine
from launch.ranks.process_group import joined
from launch.ranks.rendezvous import check_degrees, discover
from runtime.config import EngineConfig, require_real_texts
from runtime.engine import Engine
from runtime.frontend.validation import RequestError
from runtime.watchdog.parent_death import die_with_parent


@contextmanager
def open_engine(config: EngineConfig) -> Iterator[Engine]:
    """The engine of this rank, for the time of a ``with`` block; blocks until all ranks have loaded.

    Alone in plain Python; under torchrun or srun every rank opens it with the same ``config``, whose tensor_parallel is
    set to what fits the number of ranks. Rank 0 (``engine.is_leader``) has the client, the others call
    ``engine.follow()``. A process of a launcher ends with it from then on.

    When rank 0 leaves the block, all ranks take the same last turn, also after a RequestError: one request that cannot
    be served is no fault of the job. Any other error on any rank ends all ranks at once, with exit code 70 and a report
    of each. Raises ConfigError, ModelConfigError or RendezvousError.
    """
    rendezvous = discover(os.environ)
    if rendezvous.launcher != "plain":
        die_with_parent()
    require_real_texts(config, "a program")
    config = replace(config, tensor_parallel=check_degrees(None, config.data_parallel, rendezvous))
    refused: RequestError | None = None
    with joined(rendezvous, config.device), start_engine.open_engine(config, rendezvous) as engine:
        try:
            yield engine
        except RequestError as error:
            refused = error
        if engine.is_leader and not engine.control.stopped:
            engine.stop()
    if refused is not None:
        raise refused
