"""What every rank of a job must have in common, as digests that the handshake compares before anything is captured.

Knows: which files and options make two ranks the same. Does not know: how digests are exchanged (parallel/control).
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

from launch.ranks.rendezvous import Rendezvous
from parallel.control.protocol.handshake import Identity
from runtime.config import EngineConfig

_PACKAGES = ("launch", "runtime", "parallel", "models")


def identity_of(config: EngineConfig, rendezvous: Rendezvous) -> Identity:
    """This rank's identity. Weights are compared by name and size, small files by content."""
    return Identity(
        job=rendezvous.job_number,
        epoch=rendezvous.epoch,
        world=rendezvous.topology.world,
        horizon=config.horizon or 0,  # None: settled before the first turn, from there on the same
        config=config.describe(),
        model=weights_digest(config),
        code=code_digest(),
    )


def weights_digest(config: EngineConfig) -> str:
    """Of the model's folder, of the drafter's, and of the file of ids that it drafts from."""
    speculation = config.speculation
    parts = [model_digest(Path(config.model)).encode()]
    if speculation is not None and speculation.model is not None:
        parts.append(model_digest(Path(speculation.model)).encode())
    if speculation is not None and isinstance(speculation.token_map, str):
        file = Path(speculation.token_map)
        parts.append(file.read_bytes() if file.is_file() else b"")
    return parts[0].decode() if len(parts) == 1 else _digest(parts)


def model_digest(folder: Path) -> str:
    """Of a checkpoint folder: contents of its JSON files, names and sizes of its safetensors files."""
    parts: list[bytes] = []
    for path in sorted(folder.glob("*.json")):
        parts += [path.name.encode(), path.read_bytes()]
    for path in sorted(folder.glob("*.safetensors")):
        parts += [path.name.encode(), str(path.stat().st_size).encode()]
    return _digest(parts)


def code_digest() -> str:
    """Of every source file of this installation."""
    root = Path(__file__).resolve().parent.parent
    parts: list[bytes] = []
    for package in _PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            parts += [str(path.relative_to(root)).encode(), path.read_bytes()]
    return _digest(parts)


def _digest(parts: Iterable[bytes]) -> str:
    digest = blake2b(digest_size=8)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()
