"""Ranks read one file of expert loads, or all of them say that they do not."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from runtime.config import ConfigError
from runtime.groups.expert_placement import _require_same_file
from tests.runtime.engine.group_rigs import Meeting


@pytest.mark.parametrize("contents", [(b"a", b"a"), (b"a", b"b"), (b"b", b"a"), (b"", b"a")])
def test_ranks_with_other_files_all_say_so(contents: tuple[bytes, bytes], tmp_path: Path) -> None:
    """None waits in an agreement that the others have left."""
    meeting = Meeting(2)

    def rank(index: int) -> str:
        path = tmp_path / str(index)
        path.write_bytes(contents[index])
        try:
            _require_same_file(path, lambda number: min(meeting.everyones(index, number)))
        except ConfigError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(2) as threads:
        said = list(threads.map(rank, range(2)))
    if contents[0] == contents[1]:
        assert said == ["", ""]
    else:
        assert all(f"expert_map {tmp_path / str(index)} is not the same file" in said[index] for index in range(2))
