"""Launches of one round, counted on a machine without a GPU: ``python -m tests.bench.round_launches``.

A rank's steps run over NvidiaKernels with tensors on torch's meta device (tests/models/kernels/rank_without_gpu.py).
Each launch of a Triton kernel counts, each product of cuBLAS, and each torch operator that makes or changes a tensor: a
few of them are more than one launch on a GPU (topk, sort, scans), views and bare allocations are none.

Knows: how a launch looks from outside, and which function of the repository asked for it. Does not know: how long one
takes.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
from triton.runtime.jit import JITFunction

from models.config import ModelConfig
from models.kernels import nvidia
from models.layers.context import ModelContext
from models.registry import model_class
from runtime.execute.cache.pool import CachePool
from runtime.execute.proposer import ProposerParts
from runtime.execute.result_ring import ResultRing
from runtime.execute.role import ExecutorConfig, RoleParts
from runtime.execute.sampling.inputs import SamplingVariant
from runtime.execute.slot_state import SlotTables
from runtime.execute.step.decode import DecodeRole
from runtime.execute.step.row_role import RowRole
from runtime.execute.step.window import WindowRole
from runtime.schedule.config import StepLimits
from runtime.speculate.methods import proposer_for
from runtime.speculative_config import WITH_WEIGHTS, speculative_config
from tests.dispatch_mode import DispatchMode
from tests.models.kernels.compiling_driver import CompilingDriver
from tests.models.kernels.rank_without_gpu import META, FirstRank, play_an_h200

ROOT = Path(__file__).parents[2]
SHAPES = ROOT / "models/shapes"
SHAPE = "qwen3-8b"
OWN_LAYER_SHAPE = "qwen3.5-27b"  # whose checkpoints hold an MTP layer
PARTS = ("runtime/", "models/", "parallel/")  # of the repository, whose lines ask for launches
SILENT = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach", "alias", "_unsafe_view"}
ROUNDS: dict[str, dict[str, Any]] = {
    "mtp": {"method": "mtp", "num_speculative_tokens": 3},
    "dflash": {"method": "dflash", "num_speculative_tokens": 7},
    "tree": {"method": "dflash", "num_speculative_tokens": 7, "tree_size": 32},
    "ngram": {"method": "ngram", "num_speculative_tokens": 3},
    "eagle3": {"method": "eagle3", "num_speculative_tokens": 3},
}
SCRIPT = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5}
DRAWN = {"draft_sample_method": "probabilistic"}
SAMPLED = SamplingVariant(random=True)


class Case(NamedTuple):
    """``keys``: of --speculative-config, without the drafter's folder; None: no speculation. ``own_layer``: of a target
    with an MTP layer of its own. ``single``: steps of one token are counted, too."""

    keys: Mapping[str, Any] | None = None
    variant: SamplingVariant = SamplingVariant()
    own_layer: bool = False
    single: bool = True


CASES: dict[str, Case] = {
    "plain": Case(),
    **{name: Case(keys) for name, keys in ROUNDS.items()},
    **{f"{name}, scripted": Case({**ROUNDS[name], **SCRIPT}, single=False) for name in ("mtp", "dflash", "tree")},
    "plain, sampled": Case(variant=SAMPLED),
    **{f"{name}, sampled": Case(ROUNDS[name], SAMPLED, single=False) for name in ("mtp", "dflash")},
    **{f"{name}, drawn": Case({**ROUNDS[name], **DRAWN}, SAMPLED, single=False) for name in ("mtp", "dflash")},
    "plain, 27B": Case(own_layer=True),
    "own mtp, 27B": Case({"method": "mtp", "num_speculative_tokens": 3}, own_layer=True),
}


class Launches(DispatchMode):
    """While it is entered, ``found`` counts (what, where in the repository it was asked for)."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[str, str]] = Counter()

    def count(self, what: str) -> None:
        frame: Any = sys._getframe(1)
        here: list[str] = []
        while frame is not None:
            name = frame.f_code.co_filename
            if name.startswith(str(ROOT)) and (path := name[len(str(ROOT)) + 1 :]).startswith(PARTS):
                here.append(f"{path}:{frame.f_code.co_name}")
            frame = frame.f_back
        target = any(place == "models/layers/decoder.py:forward" for place in here) and not any(
            place.startswith("models/drafters/") for place in here
        )
        self.found[what, "the target's layers" if target else here[0]] += 1

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        schema = func._schema
        returned = [one.alias_info for one in schema.returns]
        a_view = bool(returned) and all(alias is not None and not alias.is_write for alias in returned)
        if not a_view and schema.name.removeprefix("aten::") not in SILENT:
            self.count(schema.name.removeprefix("aten::"))
        return result


def rank_of(case: Case, ranks: int = 1) -> tuple[RowRole, RowRole | None]:
    """(decode, and with a proposer the role of its windows), of the first of so many ranks."""
    folder = SHAPES / (OWN_LAYER_SHAPE if case.own_layer else SHAPE)
    config = ModelConfig.from_folder(folder)
    with META:
        context = ModelContext(FirstRank(ranks), nvidia.NvidiaKernels(META, prefill="triton"), torch.bfloat16)
        model = model_class(config.architecture)(config, context)
    compute = SimpleNamespace(submit=lambda work: work(), synchronize=lambda: None)
    zeros = partial(torch.zeros, device=META)
    device = cast(Any, SimpleNamespace(torch_device=META, zeros=zeros, pinned=zeros, compute=compute))
    keys = dict(case.keys or {})
    if keys.get("method") in WITH_WEIGHTS and not case.own_layer:
        keys["model"] = str(folder / keys["method"])
    chosen = speculative_config(keys) if keys else None
    width, tree = (chosen.width, keys.get("tree_size", 0)) if chosen else (1, 0)
    limits = StepLimits(8, 64, block_size=64, max_model_len=8192, width=width, tree=tree)
    tables = SlotTables(
        device, max_requests=8, max_blocks=128, vocab_size=config.vocab_size, history=8192 if chosen else 0
    )
    ring = ResultRing(device, entries=3, rows=8, width=width)
    pool = CachePool(device, block_size=64, blocks=63, slots=9)
    caches = pool.allocate(model.cache_layout)
    proposer = None
    if chosen is not None:
        make = proposer_for(chosen, target_folder=folder, load_format="dummy")
        proposer = make(ProposerParts(device, model, pool, tables, limits))
    staging = cast(Any, SimpleNamespace(row_map=lambda role, rows: torch.zeros(rows, dtype=torch.int64, device=META)))
    sizes = ExecutorConfig(limits, (1, 8), memory_fraction=0.9, num_blocks=63, agree_min=int)
    parts = RoleParts(device, model, caches, pool, tables, ring, staging, sizes, proposer=proposer)
    return DecodeRole(parts), WindowRole.of_proposer(parts) if proposer is not None else None


def launches_of(role: RowRole, rows: int, variant: SamplingVariant) -> Counter[tuple[str, str]]:
    """Of one step of so many rows."""
    rows_B = torch.zeros(rows, dtype=torch.int64, device=META)
    counting = Launches()
    with counting:
        kept = JITFunction.run
        played: Any = JITFunction
        played.run = lambda self, *_, **__: counting.count(self.fn.__name__)
        try:
            role.decode(rows_B, variant)
        finally:
            played.run = kept
    return counting.found


def play() -> None:
    """Tensors without data pass for a GPU's, for good."""
    play_an_h200()
    CompilingDriver(compile=False).activate()
    anywhere: Any = torch.Tensor
    anywhere.is_cuda = property(lambda tensor: tensor.is_meta)


def lines_of(name: str, rows: int, ranks: int, *, by_place: bool = False) -> Iterator[str]:
    """Of the table, for one of CASES."""
    case = CASES[name]
    decode, window = rank_of(case, ranks)
    for what, role in (("round", window), ("single token", decode)):
        if role is None or (role is decode and not case.single):
            continue
        found = launches_of(role, rows, case.variant)
        beside = sum(count for (_, place), count in found.items() if place != "the target's layers")
        yield f"| {name}, {what} | {found.total()} | {beside} |"
        if not by_place:
            continue
        places: dict[str, Counter[str]] = {}
        for (operation, place), count in found.items():
            places.setdefault(place, Counter())[operation] += count
        for place, operations in sorted(places.items(), key=lambda one: -one[1].total()):
            yield f"    {operations.total():4} {place}: {dict(operations.most_common())}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--by-place", action="store_true", help="each line's launches, most first")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help="[all]")
    options = parser.parse_args()
    play()
    print("| step | launches | of these beside the target's layers |\n| --- | --- | --- |")
    for name in options.only:
        for line in lines_of(name, options.rows, options.ranks, by_place=options.by_place):
            print(line, flush=True)


if __name__ == "__main__":
    main()
