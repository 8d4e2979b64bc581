"""Two thousand generated bad lines and all hand-written ones among good ones, over the real engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.api import bad_lines
from tests.launch.generate import bad_input


@pytest.mark.slow
def test_bad_lines_get_one_row_each_and_change_no_token_of_the_others(tmp_path: Path) -> None:
    contained = bad_input.check(tmp_path, generated=2000, good=24)
    assert len(bad_lines.HAND_WRITTEN) >= 200
    assert contained.errors == 2000 + len(bad_lines.HAND_WRITTEN)
    assert contained.answers == 24


def test_the_check_bites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that is not bad has no error row, and a wrong reason is seen."""
    monkeypatch.setattr(bad_lines, "HAND_WRITTEN", [(b'{"id": "x", "prompt": "a"}', "")])
    with pytest.raises(bad_input.NotContained, match=r"ended with 0"):
        bad_input.check(tmp_path, generated=0, good=1)
    monkeypatch.setattr(bad_lines, "HAND_WRITTEN", [(b"{", "another reason")])
    with pytest.raises(bad_input.NotContained, match=r"line . says .*, without 'another reason'"):
        bad_input.check(tmp_path / "again", generated=0, good=1)
