"""A rank that is killed or stopped in the middle of a decode, its peers inside a collective of a captured graph.

The promises are those of tests/faults; what differs is that nothing on the host waits for the device, and that the
ranks that are left cannot leave their collective. Either of two ranks is lost, and one of four where there are four
GPUs.

Run: python3 -m pytest -m multigpu tests/gpu/test_faults_gpu.py    # -k two-ranks, -k four-ranks: only those
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

import tests.faults.job
from tests.faults.cases import AFTER_DEATH, AFTER_HANG, LIMIT, Case, Fault, Phase
from tests.faults.job import ROOT, Job
from tests.gpu.ranks_on_gpus import on_gpus

LOST = {2: (0, 1), 4: (2,)}  # of so many ranks, one at a time
REQUESTS = 8
MODEL = Path("models/shapes/qwen3-0.6b")
COLD_START = 240.0  # kernels may have to be compiled first
DRIVER = 3.0  # seconds in which the driver takes a process with graphs and communicators apart


def _options(folder: Path) -> list[str]:
    lines = [
        {"id": f"r{i}", "prompt_token_ids": [100 + i] * 64, "max_tokens": 3000, "ignore_eos": True, "temperature": 0.0}
        for i in range(REQUESTS)
    ]
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = {
        "model": MODEL,
        "input": folder / "in.jsonl",
        "output": folder / "out.jsonl",
        "bundles": folder / "bundles",
        "load-format": "dummy",
        "device": "cuda",
        "max-num-seqs": REQUESTS,
        "max-model-len": 4096,
        "num-blocks": 1024,
        "decode-buckets": REQUESTS,
        "control-timeout-s": LIMIT,
    }
    return ["generate", *(text for name, value in given.items() for text in (f"--{name}", str(value)))]


@pytest.mark.multigpu
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("ranks", "fault", "rank"),
    [on_gpus(ranks, fault, rank) for ranks in LOST for fault in (Fault.KILL, Fault.STOP) for rank in LOST[ranks]],
)
def test_a_rank_is_lost_in_the_middle_of_a_decode(
    ranks: int, fault: Fault, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tests.faults.job, "PATIENCE", COLD_START)
    case = Case(fault, Phase.DECODE, rank)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    with Job(tmp_path, str(case)) as job:
        job.environ["FAULT_LOAD_SECONDS"] = str(COLD_START)
        job.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        program = ["-m", "tests.faults.rank", str(case), str(tmp_path), *_options(tmp_path)]
        launched = job.start([*torchrun, *program])
        job.wait_for_fault(launched)
        outcome = job.outcome(launched)
    print(
        f"{case} of {ranks} ranks: the job ended {outcome.seconds:.1f} s after the fault, "
        f"the last rank {outcome.ranks_gone:.1f} s; "
        f"culprit {outcome.culprit}, exit code {outcome.code}, left {outcome.left}"
    )
    promised = AFTER_DEATH if fault is Fault.KILL else LIMIT + AFTER_HANG
    assert outcome.code not in (0, None), outcome.said[-3000:]
    assert outcome.seconds is not None
    assert outcome.seconds <= promised + DRIVER, outcome.said[-3000:]
    assert outcome.culprit == rank, outcome.said[-3000:]
    assert not outcome.left
