"""Folders as a few files of limited size, and compiled kernels from one machine to the next.

Knows: which files of the kernels' caches the next machine needs, where FlashInfer looks for modules that are built.
Does not know: what was measured (measure.py).

A machine from which few files come back takes files up to PIECE bytes: what is larger is cut into NAME.0, NAME.1, ...
"""

from __future__ import annotations

import importlib.util
import io
import shutil
import tarfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

PIECE = 15 << 20
CACHES = "caches.tar.gz"
# Under the home folder. Of Triton's files only these are read where a kernel is there already; FlashInfer's objects and
# sources would make ninja build the module again, since they are older than the package that was just installed.
_KERNELS = (
    (".triton/cache", ("*.cubin", "*.json", "*.so")),
    (".cache/flashinfer", ("**/cached_ops/*/*.so",)),
    (".cache/lockstride", ("*.json",)),
)


def pack(archive: Path, base: Path, files: Iterable[Path]) -> list[Path]:
    """``files``, all under ``base``, as one archive or, where that is too large, as its pieces. What was written.

    A file may grow, shrink or go away meanwhile: whoever writes it may still be at work."""
    for old in (archive, *_pieces(archive)):
        old.unlink(missing_ok=True)
    with tarfile.open(archive, "w:gz", compresslevel=6) as tar:
        for file in files:
            _add(tar, file, str(file.relative_to(base)))
    if archive.stat().st_size <= PIECE:
        return [archive]
    written: list[Path] = []
    with archive.open("rb") as stream:
        while piece := stream.read(PIECE):
            written.append(archive.with_name(f"{archive.name}.{len(written)}"))
            written[-1].write_bytes(piece)
    archive.unlink()
    return written


def _add(tar: tarfile.TarFile, file: Path, name: str) -> None:
    with suppress(
        FileNotFoundError
    ):  # it was renamed since it was listed: under its new name it is in the next archive
        entry = tar.gettarinfo(file, name)
        if not entry.isreg():
            tar.addfile(entry)
            return
        content = file.read_bytes()
        entry.size = len(content)  # tar.add() would go by the size of a moment ago, and fail where it has shrunk
        tar.addfile(entry, io.BytesIO(content))


def pack_kernels(folder: Path, home: Path) -> list[Path]:
    """What Triton, FlashInfer and start-up measurements keep under ``home``."""
    files = [path for cache, kinds in _KERNELS for kind in kinds for path in _found(home / cache, kind)]
    return pack(folder / CACHES, home, sorted(set(files)))


def unpack_kernels(folder: Path, home: Path, package: Path | None = None) -> int:
    """The number of files restored from ``folder``. FlashInfer's modules also go to where its ``package`` (by default
    the one that would be imported) takes them without asking ninja."""
    whole = folder / CACHES
    parts = [whole] if whole.exists() else sorted(_pieces(whole), key=lambda path: int(path.suffix[1:]))
    joined = io.BytesIO(b"".join(part.read_bytes() for part in parts))
    with tarfile.open(fileobj=joined) as tar:
        names = tar.getnames()
        tar.extractall(home, filter="data")
    package = package or _flashinfer()
    if package is not None:
        for module in _found(home / ".cache/flashinfer", "**/cached_ops/*/*.so"):
            ready = package / "data" / "aot" / module.stem / module.name
            ready.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(module, ready)
    return len(names)


def _flashinfer() -> Path | None:
    spec = importlib.util.find_spec("flashinfer")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _found(folder: Path, kind: str) -> list[Path]:
    return sorted(folder.glob(kind) if "/" in kind else folder.rglob(kind))


def _pieces(archive: Path) -> list[Path]:
    return [path for path in archive.parent.glob(f"{archive.name}.*") if path.suffix[1:].isdecimal()]
