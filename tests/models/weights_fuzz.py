"""Checkpoints with one thing wrong: an error that names file and tensor, or, where nothing is lost, the same weights.

python -m tests.models.weights_fuzz --mutations 20000      the long form
python -m tests.models.weights_fuzz --seed 4711            one mutation again

Every tensor that is made while a checkpoint is read is counted: none may be larger than twice the files, whatever
sizes these declare, and what is refused by its headers has made none at all.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.checkpoint import WeightsError
from models.registry import config_from_dict
from models.weights import load_model
from parallel.comm.collectives import SingleRank
from tests.dispatch_mode import DispatchMode
from tests.models.tiny_checkpoint import TINY, full_tensors
from tests.models.weights_index_mutations import SEVERAL_FILES
from tests.models.weights_mutations import ONE_FILE, Checkpoint, Mutation
from tests.plant import reference_kernels

CONFIG = config_from_dict(TINY)
KINDS = ONE_FILE + SEVERAL_FILES


class LoadedWrongly(AssertionError):
    """A mutation was loaded, refused or named otherwise than it should be, or took too much memory."""


class Allocations(DispatchMode):
    """The bytes of the largest tensor with storage that any operation gives, while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        for made in result if isinstance(result, tuple | list) else (result,):
            if isinstance(made, Tensor) and made.device.type != "meta":
                self.largest = max(self.largest, made.untyped_storage().nbytes())
        return result


def bits(tensor: Tensor) -> bytes:
    """The bytes of a tensor, so that NaNs compare too."""
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


def attempt(mutation: Mutation, folder: Path) -> str:
    """Load; returns "loaded" or the refusal. Raises LoadedWrongly."""
    total = sum(file.stat().st_size for file in folder.parent.rglob("*") if file.is_file())
    with Allocations() as allocations:
        try:
            model = load_model(CONFIG, folder, collectives=SingleRank(), kernels=reference_kernels())
        except WeightsError as error:
            model, refusal = None, str(error)
    if allocations.largest > 2 * total:
        raise LoadedWrongly(f"a tensor of {allocations.largest} bytes was made for files of {total}")
    if model is None:
        check_refusal(mutation, folder, refusal)
        if allocations.largest:
            raise LoadedWrongly(f"a tensor of {allocations.largest} bytes was made before the refusal: {refusal}")
        return refusal
    if mutation.expected is None:
        raise LoadedWrongly("it was loaded")
    for name, shard in model.checkpoint_shards().items():
        if bits(shard.pieces[0].target) != mutation.expected[name]:
            raise LoadedWrongly(f"tensor {name!r} was loaded with other values")
    return "loaded"


def check_refusal(mutation: Mutation, folder: Path, message: str) -> None:
    if mutation.must_load:
        raise LoadedWrongly(f"it was refused: {message}")
    if str(folder) not in message and not any(file.name in message for file in folder.iterdir()):
        raise LoadedWrongly(f"the refusal names no file: {message}")
    if mutation.named and not any(name in message for name in mutation.named):
        raise LoadedWrongly(f"the refusal names none of {mutation.named}: {message}")
    if "\n" in message or len(message) > 2000:
        raise LoadedWrongly(f"the refusal is no line to read: {message[:3000]!r}")


def fuzz(base: Path, first: int, how_many: int) -> Counter[str]:
    """Mutations of the seeds ``first`` and after; returns how often each kind was refused or loaded."""
    torch.set_num_threads(1)
    tensors, outcomes = full_tensors(CONFIG), Counter[str]()
    checkpoint = Checkpoint.of({name: bits(tensor) for name, tensor in tensors.items()}, tensors)
    for seed in range(first, first + how_many):
        draw = random.Random(seed)
        kind = KINDS[seed % len(KINDS)]
        with tempfile.TemporaryDirectory(dir=base) as home:
            folder = Path(home) / "model"
            folder.mkdir()
            mutation = kind(draw, seed // len(KINDS), checkpoint, folder)
            try:
                outcome = attempt(mutation, folder)
            except Exception as error:
                raise LoadedWrongly(f"seed {seed} ({kind.__name__}): {type(error).__name__}: {error}") from error
        outcomes[f"{kind.__name__} {'loaded' if outcome == 'loaded' else 'refused'}"] += 1
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=20_000)
    parser.add_argument("--seed", type=int, help="only this one")
    options = parser.parse_args()
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        fuzz(Path(folder), 0, len(KINDS))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if options.seed is None:
            outcomes = fuzz(Path(folder), 0, options.mutations)
        else:
            outcomes = fuzz(Path(folder), options.seed, 1)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    refused = sum(count for name, count in outcomes.items() if name.endswith("refused"))
    digest = hashlib.sha256(repr(sorted(outcomes.items())).encode()).hexdigest()[:12]
    print("\n".join(f"{count:7d} {name}" for name, count in sorted(outcomes.items())))
    print(
        f"{outcomes.total()} mutations of {len(KINDS)} kinds: {refused} refused by name, {outcomes.total() - refused} "
        f"loaded with the bytes they hold; peak memory grew by {grown:.1f} MiB; {time.perf_counter() - begin:.0f} s; "
        f"outcomes {digest}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
