"""A home folder for caches where the user has none: a container's user id, or a HOME that cannot be written.

Knows: which variables say where compilers and libraries keep what they make. Does not know: what they keep there.
"""

from __future__ import annotations

import getpass
import logging
import os
import tempfile
from pathlib import Path

_CACHES = ("TRITON_CACHE_DIR", "TRITON_HOME", "TORCHINDUCTOR_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE", "XDG_CACHE_HOME")
_BELOW_HOME = ("", ".cache/lockstride", ".cache/flashinfer", ".triton/cache")

log = logging.getLogger(__name__)


def settle_home() -> None:
    """Points HOME, and cache folders that are named, to a private temporary folder where they cannot be written.

    Before Triton and FlashInfer are imported. Processes that this one starts inherit it.
    """
    home = Path(os.path.expanduser("~"))  # "~" itself where neither HOME nor the password file says it
    wrong = [name for name in _CACHES if os.environ.get(name) and not _may_write(Path(os.environ[name]))]
    if not home.is_absolute() or not all(_may_write(home / part) for part in _BELOW_HOME):
        wrong.append("HOME")
    if wrong:
        folder = _private_folder()
        told = ", ".join(f"{name} ({os.environ.get(name, 'not set')})" for name in sorted(wrong))
        log.warning("user id %d cannot write to %s: caches are in %s", os.geteuid(), told, folder)
        os.environ.update(dict.fromkeys(wrong, str(folder)))
    try:
        getpass.getuser()  # part of the name of torch's folder for compiled code
    except (KeyError, OSError):
        os.environ["USER"] = f"uid-{os.geteuid()}"


def _may_write(folder: Path) -> bool:
    """Whether it can be written, or made: by its nearest ancestor that is there."""
    there = next((one for one in (folder, *folder.parents) if os.path.lexists(one)), folder)
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def _private_folder() -> Path:
    """The same one for all ranks of this user on the node, unless another user has made a folder of that name."""
    folder = Path(tempfile.gettempdir()) / f"lockstride-home-{os.geteuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return Path(tempfile.mkdtemp(prefix="lockstride-home-"))
    private = folder.is_dir() and not folder.is_symlink() and found.st_uid == os.geteuid() and not found.st_mode & 0o77
    return folder if private else Path(tempfile.mkdtemp(prefix="lockstride-home-"))
