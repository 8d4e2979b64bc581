"""That jobs forked for tests start without a race, and that one that hangs tells where."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.torchrun import started, torchrun

pytestmark = pytest.mark.multiprocess

_SIBLINGS = """
import os, sys, time
from pathlib import Path
launcher, folder = os.getppid(), Path(sys.argv[1])
siblings = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
(folder / f"rank.{os.environ['RANK']}").write_text(str(len(siblings)))
while len(list(folder.glob("rank.*"))) < 6:  # one that ends is a sibling no more
    time.sleep(0.01)
"""
_HANGS = """
import os, sys, time
from pathlib import Path
def waits_for_ever():
    Path(sys.argv[1], os.environ["RANK"]).touch()
    time.sleep(3600)
waits_for_ever()
"""


def test_no_rank_runs_before_all_are_forked(tmp_path: Path) -> None:
    script = tmp_path / "siblings.py"
    script.write_text(_SIBLINGS)
    ran = torchrun(6, str(script), str(tmp_path))
    assert ran.returncode == 0, ran.said
    assert [(tmp_path / f"rank.{rank}").read_text() for rank in range(6)] == ["6"] * 6


def test_a_job_that_hangs_tells_where_its_ranks_stand(tmp_path: Path) -> None:
    script = tmp_path / "hangs.py"
    script.write_text(_HANGS)
    with started(2, str(script), str(tmp_path)) as running:
        while not all((tmp_path / rank).exists() for rank in "01"):
            assert not running.ended
            time.sleep(0.05)
        with pytest.raises(TimeoutError, match=r"(?s)hangs.*waits_for_ever.*waits_for_ever"):
            running.wait(patience_s=0.0)
        assert running.ended


def test_a_job_that_is_busy_does_not_hang(tmp_path: Path) -> None:
    """However long it takes: on a busy machine all jobs do."""
    script = tmp_path / "works.py"
    script.write_text("import time\nwhile time.process_time() < 1.2: pass\n")
    with started(1, str(script)) as running:
        assert running.wait(patience_s=1.0).returncode == 0
