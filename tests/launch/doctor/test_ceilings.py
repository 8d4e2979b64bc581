"""What the doctor measures of GPUs: how it times, and what it says where something is missing. No GPU is needed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from launch.doctor import ceilings as doctor_ceilings
from launch.doctor.findings import Level, Section

MATMUL = 779e12


class Clock:
    """Stands for the GPU's: ``work`` advances it, events read it. ``overhead``: of an event, whatever came before."""

    def __init__(self, overhead: float = 0.0) -> None:
        self.now, self.overhead, self.done = 0.0, overhead, 0

    def work(self, seconds: float) -> None:
        self.now += seconds
        self.done += 1

    def event(self, enable_timing: bool) -> Event:
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, clock: Clock) -> None:
        self._clock, self.at = clock, 0.0

    def record(self) -> None:
        self._clock.now += self._clock.overhead
        self.at = self._clock.now

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) * 1e3


@pytest.mark.parametrize(("launches", "expected"), [(1, 0.26e-3), (16, 0.250625e-3)])
def test_time_is_that_of_one_launch(launches: int, expected: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """10 us around a row of launches are 4% of one of 250 us, and hardly anything of sixteen."""
    clock = Clock(overhead=10e-6)
    monkeypatch.setattr(torch.cuda, "Event", clock.event)
    assert doctor_ceilings._seconds(lambda: clock.work(0.25e-3), launches) == pytest.approx(expected)
    assert clock.done == 1 + doctor_ceilings._REPEATS * launches


@pytest.mark.parametrize(("summed", "copied"), [(1e-3, 2e-3), (2e-3, 1e-3)])
def test_without_triton_the_faster_way_of_torch_counts(
    summed: float, copied: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both really run, over tensors of a few bytes; what either moves is all of them."""
    times = iter((summed, copied))

    def seconds(work: Callable[[], torch.Tensor], launches: int) -> float:
        assert launches == doctor_ceilings._READS
        assert work().device.type == "cpu"
        return next(times)

    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(doctor_ceilings, "_BYTES", 1 << 12)
    monkeypatch.setattr(doctor_ceilings, "_seconds", seconds)
    assert doctor_ceilings.torch_read_rate(torch.device("cpu")) == pytest.approx((1 << 12) / 1e-3)
    assert next(times, None) is None


def measured(monkeypatch: pytest.MonkeyPatch, read: Callable[[torch.device], float], count: int = 1) -> Section:
    """Ceilings of ``count`` GPUs that read as ``read`` says, through torch at 3.5 TB/s."""
    rates: dict[str, Callable[..., float]] = {
        "read_rate": read,
        "torch_read_rate": lambda device: 3.5e12,
        "matmul_rate": lambda device: MATMUL,
        "copy_rate": lambda source, target: 400e9,
    }
    for name, rate in rates.items():
        monkeypatch.setattr(doctor_ceilings, name, rate)
    return doctor_ceilings.ceilings(count)


def raises(error: Exception) -> Callable[[torch.device], float]:
    def read(device: torch.device) -> float:
        raise error

    return read


def test_with_triton_nothing_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    section = measured(monkeypatch, lambda device: 4.29e12)
    assert section.facts["each"] == [{"index": 0, "read_tb_per_s": 4.29, "bf16_tflop_per_s": 779.0}]
    assert section.findings == []


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ImportError("No module named 'triton'"), "No module named 'triton'"),
        (RuntimeError("Failed to find C compiler.\nPlease specify one"), "Failed to find C compiler."),
        (OSError(), "OSError"),
    ],
)
def test_without_triton_it_is_a_lower_bound(error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    section = measured(monkeypatch, raises(error))
    assert section.facts["each"][0]["read_tb_per_s"] == 3.5
    (finding,) = section.findings
    assert finding.level is Level.NOTE
    assert finding.text.startswith("GPU 0 reads at least this fast")
    assert finding.text.endswith(f"({reason})")
    assert "triton" in finding.advice


def test_without_memory_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    section = measured(monkeypatch, raises(torch.OutOfMemoryError("1 GiB")))
    assert section.facts["each"] == [{"index": 0}]
    assert [finding.text for finding in section.findings] == ["GPU 0 has too little free memory to be measured"]


def test_a_slow_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    section = measured(monkeypatch, lambda device: 4.29e12 if device.index else 3.6e12, count=2)
    (finding,) = section.findings
    assert finding.level is Level.WARNING
    assert finding.text.startswith("GPU 0 reaches 3.6 read_tb_per_s")


def test_only_whole_blocks_are_read() -> None:
    read: Any = pytest.importorskip(
        "models.kernels.bandwidth_probe", reason="Triton comes with CUDA builds, or from pip"
    )
    with pytest.raises(ValueError, match=r"8193 values of torch\.int32 .* a multiple of 8192"):
        read.block_maxima(torch.zeros(read.BLOCK + 1, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"16384 values of torch\.int64"):
        read.block_maxima(torch.zeros(2 * read.BLOCK, dtype=torch.int64))
