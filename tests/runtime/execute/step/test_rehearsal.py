"""What is tried before memory is shared out: every variant that will be warmed up; the most that one held is set aside.

On a CPU nothing is measured, so here the twin says that it is no CPU, and measures what the tensors of a step hold.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from parallel.comm.collectives import SingleRank
from parallel.control.interface import SingleRankControl
from runtime import build
from runtime.config import EngineConfig
from runtime.execute.cache.sizing import CacheSizing, size_cache
from runtime.execute.device.cpu_twin import TwinDevice
from runtime.execute.device.protocol import Work
from runtime.execute.launch_spec import GREEDY
from runtime.execute.sampling.inputs import SamplingVariant
from tests.dispatch_mode import DispatchMode
from tests.models.tiny_delta import FAMILIES
from tests.plant import Op, name_of, plant, width_of
from tests.runtime.engine.rig import TINY
from tests.selection import covering

BUCKETS = (2, 8)
MEMORY = 128 << 20
_WeakStorage: Any = StorageWeakRef  # torch's, not annotated
NGRAM = {"method": "ngram", "num_speculative_tokens": 2}


def storages(tree: object) -> Iterator[torch.UntypedStorage]:
    """Of every tensor in it. Torch's own tree_leaves takes most of a trial's time."""
    if isinstance(tree, torch.Tensor):
        yield tree.untyped_storage()
    elif isinstance(tree, (tuple, list, dict)):
        for branch in tree.values() if isinstance(tree, dict) else tree:
            yield from storages(branch)


@cache
def makes_no_storage(op: Any) -> bool:
    """Whether it returns views of its arguments, or its arguments."""
    return any(result.alias_info is not None for result in op._schema.returns)


class HeldBytes(DispatchMode):
    """What tensors that were made inside hold at once: ``peak``, the most of it."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._held: dict[int, tuple[Any, int]] = {}
        self._bytes = 0  # of all in _held, of which some may be gone

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for storage in () if makes_no_storage(func) else storages(made):
            _, before = self._held.get(storage._cdata, (None, 0))  # it was gone, and its place taken
            self._held[storage._cdata] = _WeakStorage(storage), storage.nbytes()
            self._bytes += storage.nbytes() - before
        if self._bytes > self.peak:  # or what is there is less, whatever of it is gone
            self._held = {key: held for key, held in self._held.items() if not held[0].expired()}
            self._bytes = sum(size for _, size in self._held.values())
            self.peak = max(self.peak, self._bytes)
        return made


class NoCpu(str):
    """Where tensors are made on the CPU although its type is another one."""

    type = "stand-in"


class MeasuredTwin(TwinDevice):
    """The twin of a device whose memory is measured; ``peaks`` are all measurements."""

    def __init__(self) -> None:
        super().__init__(memory_bytes=MEMORY)
        self.torch_device = cast(torch.device, NoCpu("cpu"))
        self.peaks: list[int] = []

    def peak_of(self, work: Work) -> int:
        held = HeldBytes()

        def measured() -> None:
            with held:
                work()

        self.compute.submit(measured)
        self.compute.synchronize()
        self.peaks.append(held.peak)
        return held.peak


@dataclass(frozen=True, slots=True)
class Tried:
    """A step over padding, uncaptured: of which role, and what its tensors held at most."""

    role: str
    bucket: int
    variant: SamplingVariant
    peak: int


class Start:
    """An engine's start. ``tried``: steps that were tried until memory was shared out; ``sizing``: how it was."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.tried: list[Tried] = []
        self.device = MeasuredTwin()
        shared_out = False

        def noted(try_variant: Op, bucket: int, variant: SamplingVariant, *exchange: int) -> None:
            with HeldBytes() as held:
                try_variant(bucket, variant, *exchange)
            if not shared_out:
                self.tried.append(Tried(name_of(try_variant), bucket, variant, held.peak))

        def sized(*arguments: Any, **named: Any) -> CacheSizing:
            nonlocal shared_out
            shared_out = True
            return size_cache(*arguments, **named)

        plant(monkeypatch, noted, part="rows.try_variant")
        monkeypatch.setattr("runtime.execute.executor.size_cache", sized)
        monkeypatch.setattr(build, "open_device", lambda name: self.device)
        config = EngineConfig(
            model=str(folder),
            load_format="dummy",
            device="cpu",
            max_num_seqs=BUCKETS[-1],
            decode_buckets=BUCKETS,
            max_model_len=64,
            **({"max_prefill_tokens": 8} | options),
        )
        place: dict[str, Any] = {"control": SingleRankControl(), "collectives": SingleRank(), "agree_min": int}
        with build.build_engine(config, **place, device="cpu") as engine:
            self.sizing = engine.executor.sizing


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a model whose logits are the largest that a step holds."""
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "vocab_size": 4096}))
    return tmp_path


@pytest.mark.parametrize(
    ("proposing", "warm"),
    covering((False, True), [("greedy",), ("penalised", "greedy", "random"), ("greedy", "filtered")], at_once=1),
)
def test_every_warm_variant_is_tried_and_the_most_that_one_held_is_set_aside(
    folder: Path, monkeypatch: pytest.MonkeyPatch, warm: tuple[str, ...], proposing: bool
) -> None:
    start = Start(folder, monkeypatch, warm=warm, speculative_config=NGRAM if proposing else None)
    variants = {build.WARM_VARIANTS[kind] for kind in warm}
    roles = {one.role for one in start.tried}
    assert len(roles) == 1 + proposing
    for role in roles:
        of_largest = {one.variant for one in start.tried if (one.role, one.bucket) == (role, BUCKETS[-1])}
        assert of_largest == {GREEDY, *variants}, "also one that is neither the first nor the last"
        assert {one.bucket for one in start.tried if one.role == role} == set(BUCKETS)
    most = max(start.tried, key=lambda one: one.peak)
    assert most.variant == max(variants, key=list(build.WARM_VARIANTS.values()).index)
    assert start.sizing.activation_peak == most.peak
    assert start.sizing.activation_peak in start.device.peaks, "as the device measured it"


def test_what_windows_beside_chunks_keep_is_in_use_and_no_part_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is there during every role's steps. Made inside a measured one it would be set aside as well as in use."""
    (tmp_path / "config.json").write_text(json.dumps({**TINY, **FAMILIES["qwen3.5"]}))
    made: list[tuple[int, int]] = []

    def noted(make_memory: Op) -> None:
        with HeldBytes() as held:
            make_memory()
        made.append((width_of(make_memory), held.peak))

    peak_of = MeasuredTwin.peak_of
    plant(monkeypatch, noted, part="mixed.make_memory")

    def measured(device: MeasuredTwin, work: Work) -> int:
        before = len(made)
        peak = peak_of(device, work)
        assert len(made) == before, "made by a step"
        return peak

    monkeypatch.setattr(MeasuredTwin, "peak_of", measured)
    Start(tmp_path, monkeypatch, max_prefill_tokens=16, speculative_config={**NGRAM, "num_speculative_tokens": 3})
    assert [width for width, _ in made] == [4, 4], "over a pool without blocks, then over the real one"
    assert made[0] == made[1]
    assert made[0][1] > 0


def test_no_role_runs_chunks_before_ranks_agreed_on_their_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    order: list[str] = []

    def agreed(agree_on_kernels: Op, *given: Any) -> None:
        order.append("agreement")
        agree_on_kernels(*given)

    def rehearsed(rehearse: Op) -> None:
        order.append(name_of(rehearse))
        rehearse()

    plant(monkeypatch, agreed, op="agree_on_kernels")
    for part in ("rows.rehearse", "prefill.rehearse", "mixed.rehearse"):
        plant(monkeypatch, rehearsed, part=part)
    Start(tmp_path, monkeypatch, max_prefill_tokens=16, speculative_config={**NGRAM, "num_speculative_tokens": 3})
    at = order.index("agreement")
    assert set(order[:at]) == {"decode", "window of 4"}
    assert set(order[at + 1 :]) == {"mixed window of 4", "prefill"}


def test_what_the_widest_warm_variant_holds_is_not_given_to_blocks(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        narrow = Start(folder, patched, warm=("greedy",)).sizing
    wide = Start(folder, monkeypatch, warm=("greedy", "penalised")).sizing
    more = wide.activation_peak - narrow.activation_peak
    assert more > 10 * narrow.shape.block_bytes
    assert narrow.num_blocks - wide.num_blocks == pytest.approx(more / narrow.shape.block_bytes, abs=1)
