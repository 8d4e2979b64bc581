"""Where caches go for a user id without a home folder, or with one that cannot be written."""

from __future__ import annotations

import logging
import os
import pwd
import tempfile
from pathlib import Path

import pytest

from launch.ranks.home import settle_home

NAMES = ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME", "TRITON_CACHE_DIR", "TRITON_HOME", "XDG_CACHE_HOME")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No variable is set; temporary folders lie in ``place``."""
    for name in (*NAMES, "TORCHINDUCTOR_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE"):
        monkeypatch.setenv(name, "x")  # so that what is set meanwhile goes
        monkeypatch.delenv(name)
    (tmp_path / "tmp").mkdir()
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user id stands in no password file."""

    def missing(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", missing)


@pytest.mark.usefixtures("unknown")
def test_an_unknown_user_has_a_private_home(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    settle_home()
    home = Path(os.environ["HOME"])
    assert home.parent == place / "tmp"
    assert home.stat().st_mode & 0o777 == 0o700
    assert os.environ["USER"] == f"uid-{os.geteuid()}"
    assert [record.levelno for record in caplog.records] == [logging.WARNING], "one line"
    assert f"user id {os.geteuid()} cannot write to HOME (not set): caches are in {home}" in caplog.text
    settle_home()
    assert os.environ["HOME"] == str(home), "of the ranks that this process starts, too"
    assert len(caplog.records) == 1


@pytest.mark.parametrize("home", ["file", "file/home", "relative"])
def test_a_home_that_cannot_be_written_is_replaced(place: Path, home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(place / home) if home != "relative" else "~")
    settle_home()
    assert Path(os.environ["HOME"]).parent == place / "tmp"


def test_a_cache_below_home_that_cannot_be_written_counts(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(place))
    (place / ".cache").write_text("left by another user")
    settle_home()
    assert Path(os.environ["HOME"]).parent == place / "tmp"


def test_only_what_cannot_be_written_is_replaced(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    usual = {"HOME": str(place / "made later"), "USER": "somebody", "XDG_CACHE_HOME": str(place)}
    for name, value in usual.items():
        monkeypatch.setenv(name, value)
    settle_home()
    assert caplog.text == ""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(place / "file" / "triton"))
    settle_home()
    assert {name: os.environ[name] for name in usual} == usual
    assert Path(os.environ["TRITON_CACHE_DIR"]).parent == place / "tmp"
    assert "TRITON_CACHE_DIR" in caplog.text


@pytest.mark.usefixtures("unknown")
@pytest.mark.parametrize("planted", ["open to all", "a link", "a file"])
def test_a_folder_that_others_may_write_is_not_taken(place: Path, planted: str) -> None:
    usual = place / "tmp" / f"lockstride-home-{os.geteuid()}"
    if planted == "a link":
        usual.symlink_to(place)
    elif planted == "a file":
        usual.write_text("")
    else:
        usual.mkdir()
        usual.chmod(0o777)
    settle_home()
    home = Path(os.environ["HOME"])
    assert home != usual
    assert home.parent == usual.parent
    assert home.stat().st_mode & 0o777 == 0o700
