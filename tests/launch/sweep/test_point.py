"""A sweep of real measurements on a tiny model, one rank and two, from the command line to the report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from launch.__main__ import main
from launch.bench.options import LatencyOptions, ThroughputOptions
from launch.sweep.ledger import Ledger
from launch.sweep.report.rows import read_report
from tests.runtime.engine.rig import tiny_folder
from tests.torchrun import python


def command(*words: str, code: int = 0) -> str:
    ended = python("launch", "sweep", *words)
    assert ended.returncode == code, ended.said
    return ended.output


@pytest.fixture
def here(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """As ``command``, for what starts no rank: in this process, which has imported everything."""

    def run(*words: str, code: int = 0) -> str:
        assert main(["sweep", *words]) == code
        return capsys.readouterr().out

    return run


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("fails", [False, pytest.param(True, marks=pytest.mark.long)])  # without ranks: test_run.py
def test_from_a_grid_to_a_report(tmp_path: Path, here: Callable[..., str], fails: bool) -> None:
    options = {"model": str(tiny_folder(tmp_path / "tiny")), "device": "cpu", "input-len": 12, "output-len": 5}
    options |= {"num-iters": 2, "num-warmups": 0, "block-size": 8, "max-model-len": 64, "protocol": "generation"}
    variables = {"tp": [1, 2], "batch": ["1,2"], "num-blocks": [None, 2][: 1 + fails]}  # two hold no request
    content: dict[str, object] = {"options": options, "grid": variables, "minutes": 4}
    if fails:
        content["exclude"] = [{"tp": 2, "num-blocks": 2}]
    grid, out = tmp_path / "grid.yaml", tmp_path / "out"
    grid.write_text(yaml.safe_dump(content))
    assert ("3 points (1 excluded)" if fails else "2 points") in here("plan", str(grid), "--out", str(out))
    said = command("run", str(grid), "--out", str(out), code=int(fails))
    assert said.count(": done in ") == 2
    assert ("KV blocks, there are 2" in said) == fails
    ledger = Ledger(out)
    assert (len(ledger.done()), len(ledger.failed())) == (2, int(fails))
    (alone, _, _), (pair, folder, _) = ledger.finished_points()
    assert (alone.tp, pair.tp) == (1, 2)
    assert len(list(folder.glob("ranks/**/stderr.log"))) == 2, "each rank has a log"
    said = here("run", str(grid), "--out", str(out), "--resume", code=int(fails))
    assert f"{2 + fails} of {2 + fails} points are done or have failed already" in said
    status = json.loads(here("status", str(out), "--json", code=int(fails)))
    assert sorted(point["state"] for point in status["points"]) == ["done", "done", "failed"][: 2 + fails]
    here("report", str(out))
    report = read_report(out / "report" / "report.json")
    assert [(row.tp, row.batch) for row in report.rows] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert all(row.tok_s and row.tpot_percentiles and row.device_idle is not None for row in report.rows)
    assert {"commit", "code_digest", "version of torch", "cpu"} <= report.environments.keys()
    assert "Scaling over tensor-parallel ranks" in (out / "report" / "report.html").read_text()


def test_estimates_know_bench_s_options() -> None:
    of_both = {"num_iters", "num_warmups", "input_len", "output_len"}
    assert {"batch_size", *of_both} <= LatencyOptions.__dataclass_fields__.keys()
    assert {"num_prompts", *of_both} <= ThroughputOptions.__dataclass_fields__.keys()
