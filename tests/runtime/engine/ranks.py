"""One rank of a tiny engine under torchrun: ``-m tests.runtime.engine.ranks FOLDER SEED OUTPUT DEPTH OPTIONS``.

OPTIONS are more fields of the EngineConfig, as JSON.

The leader runs the mixture of test_depths.py and writes what came out as JSON; with OUTPUT ending in ``.wrong`` the
last rank folds one decision of its own into its digest, as a rank that decided differently would.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from launch.ranks.process_group import joined
from launch.ranks.rendezvous import discover
from launch.ranks.start_engine import open_engine
from runtime.config import EngineConfig
from runtime.engine import Engine
from tests.runtime.engine.rig import run
from tests.runtime.engine.test_depths import mixture, outcome

WRONG_STEP = 9


def follow_with_one_wrong_decision(engine: Engine) -> None:
    while not engine.control.stopped:
        if engine.scheduler.step == WRONG_STEP:
            engine.scheduler.digest.fold(WRONG_STEP, "wrong", (4711,))
        engine.step()


def main(folder: str, seed: int, output: Path, depth: int, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    rendezvous = discover(os.environ)
    topology = rendezvous.topology
    config = EngineConfig(
        model=folder,
        load_format="dummy",
        device="cpu",
        tensor_parallel=topology.world,
        max_num_seqs=8,
        block_size=8,
        max_model_len=128,
        num_blocks=200,
        max_prefill_tokens=64,
        decode_buckets=(8,),
        chain_depth=depth,
        control_timeout_s=300.0,
        bundles=str(output.parent / "bundles"),
        **options,
    )
    with joined(rendezvous, "cpu"), open_engine(config, rendezvous) as engine:
        if not topology.is_leader:
            wrong = output.suffix == ".wrong" and topology.rank == topology.world - 1
            follow_with_one_wrong_decision(engine) if wrong else engine.follow()
            return
        finished = outcome(run(engine, mixture(seed)))
        engine.stop()
        rows = {str(i): [list(tokens), int(reason)] for i, (tokens, reason) in sorted(finished.items())}
        output.write_text(json.dumps({"rows": rows, "counters": dict(engine.counters)}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), json.loads(sys.argv[5]))
