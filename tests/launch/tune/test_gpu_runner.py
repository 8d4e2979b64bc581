"""Layers of a small model on the CPU, in which candidates are put in place and compared; times are made up."""

from __future__ import annotations

import functools
import importlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from launch.tune.plan import Effort, Task
from launch.tune.shapes import RankShare, asked_attention, asked_products
from models.kernels.attention.decode_variant import DecodeVariant
from models.kernels.matmul.choice_table import Blas, Choice, ChoiceTable, CublasLt, Gemv, LinearShape, Skinny, Wide
from models.kernels.traits import H200
from models.registry import config_from_folder
from parallel.layers.weight import Weight
from tests.plant import Op, kernels_with
from tests.torchrun import python

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, or from pip")
runner = importlib.import_module("launch.tune.gpu_runner")

DEMO = Path(__file__).parents[3] / "models" / "demo"
EFFORT = Effort(10, 2, 2, 0.1, 4)
WRONG, FINE = Gemv(1, 64, 1), Gemv(2, 64, 1)
ALGORITHMS = [CublasLt(f"{number:02x}", 1) for number in range(4)]


class Matmul:
    """A TunedProducts of torch's products; one choice computes nonsense."""

    def __init__(self) -> None:
        self.choices = ChoiceTable()

    def choice(self, shape: LinearShape) -> Choice:
        return self.choices.get(shape) or Blas()

    def choose(self, shape: LinearShape, choice: Choice) -> None:
        self.choices.put(shape, choice)

    def candidates(self, shape: LinearShape) -> list[Choice]:
        return [Blas(), *ALGORITHMS, WRONG, FINE]

    def can_run(self, shape: LinearShape, choice: Choice) -> bool:
        return not isinstance(choice, Wide)

    def runner(self, shape: LinearShape) -> Any:
        return lambda x, weight, choice: self.run(x, weight, choice, gate_up=False)

    def run(self, x: Tensor, weight: Weight, choice: Choice, *, gate_up: bool) -> Tensor:
        return x @ weight.data.T * (-1 if choice == WRONG else 1)


def cpu_kernels() -> Any:
    """Of which products by a wrong choice are wrong."""
    matmul = Matmul()

    def by_choice(linear: Op, x_TN: Tensor, weight: Weight) -> Tensor:
        shapes = [
            LinearShape.of(x_TN, weight, normed=normed, gate_up=gate_up)
            for normed in (False, True)
            for gate_up in (False, True)
        ]
        nonsense = any(matmul.choice(shape) == WRONG for shape in shapes)
        found: Tensor = linear(x_TN, weight) * (-1 if nonsense else 1)
        return found

    made: Any = kernels_with(linear=by_choice)
    made.device, made.traits, made.matmul = torch.device("cpu"), H200, matmul
    return made


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A GpuRunner of the demo model, over the CPU."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(runner, "median_graph_us", lambda run, device, replays: run().shape[0] * 10.0)
    monkeypatch.setattr(runner, "captured", lambda run: run)
    monkeypatch.setattr(runner, "replay_for", lambda graph, seconds: graph().shape[0] * 20.0)
    monkeypatch.setattr(runner, "_COLD_WEIGHTS", 1 << 20)
    monkeypatch.setattr(runner, "_COLD_KV", 1 << 12)
    return runner.GpuRunner(share(), cpu_kernels())


def share(folder: Path = DEMO, ranks: int = 2) -> RankShare:
    return RankShare.of(config_from_folder(folder), ranks, torch.float32)


@functools.cache
def layers_of(rows: int) -> tuple[LinearShape, ...]:
    (asked,) = asked_products(share(), (rows,), 256)
    return asked.layers


def task(rows: int, number: int = 0, *, whole: bool = True, in_layers: bool = True) -> Task:
    return Task(rows, layers_of(rows)[number], whole, in_layers, EFFORT, 1.0)


def test_a_candidate_runs_inside_the_layers(made: Any) -> None:
    for rows in (4, 1):
        one = task(rows)
        bench = made.bench(one)
        layers = bench._layers.count
        assert bench.brief_us(FINE, 4) == rows * 10.0 / layers
        assert made.current(one) == FINE, "it is in place"
        assert bench.lasting_us(Blas(), 0.5) == rows * 20.0 / layers
        assert made.current(one) == Blas()
    made.keep(one, FINE)
    assert made.current(one) == FINE


def test_a_wrong_result_is_no_candidate(made: Any) -> None:
    for one in (task(4), task(4, 1)):
        bench = made.bench(one)
        with pytest.raises(runner.WrongResult, match="off by"):
            bench.brief_us(WRONG, 4)
        assert bench.brief_us(FINE, 4) > 0
        made.keep(one, FINE)


def test_candidates_inside_recurrent_layers_begin_with_no_state(made: Any) -> None:
    """Each run goes on from the state that the one before it left: the same choice would be taken for a wrong one."""
    hybrid = share(DEMO / "hybrid", 1)
    (asked,) = asked_products(hybrid, (8,), 256)
    bench = runner.GpuRunner(hybrid, cpu_kernels()).bench(Task(8, asked.layers[0], True, True, EFFORT, 1.0))
    assert bench._layers._banks
    for choice in (Blas(), FINE, Blas()):
        bench.brief_us(choice, 4)
        bench.lasting_us(choice, 0.5)
        assert torch.equal(bench._run_once(choice), bench._expected)
    with pytest.raises(runner.WrongResult):
        bench.brief_us(WRONG, 4)


def test_a_product_alone(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    autotune = importlib.import_module("models.kernels.matmul.autotune")
    monkeypatch.setattr(autotune, "median_graph_us", lambda run, device, replays: (run(), 30.0)[1])
    monkeypatch.setattr(autotune, "_COLD_BYTES", 1)
    bench = made.bench(task(320, in_layers=False))
    assert bench.brief_us(FINE, 4) == 15.0, "two weights"
    with pytest.raises(runner.WrongResult):
        bench.brief_us(WRONG, 4)


def test_candidates_alone_are_compared_though_a_norm_changes_its_input(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In large steps the norm before a product writes over x, in every run."""
    autotune = importlib.import_module("models.kernels.matmul.autotune")
    monkeypatch.setattr(autotune, "median_graph_us", lambda run, device, replays: (run(), 30.0)[1])
    monkeypatch.setattr(autotune, "_COLD_BYTES", 1)
    matmul = made._kernels.matmul

    def run_normed(x: Tensor, weight: Tensor, choice: Choice) -> Tensor:
        found: Tensor = matmul.run(x.neg_().add_(1.0), weight, choice, gate_up=False)
        return found

    monkeypatch.setattr(matmul, "runner", lambda shape: run_normed)
    bench = made.bench(task(320, in_layers=False))
    for choice in (Blas(), *ALGORITHMS, FINE):
        assert bench.brief_us(choice, 4) == 15.0
    with pytest.raises(runner.WrongResult):
        bench.brief_us(WRONG, 4)


def test_what_is_tried(made: Any) -> None:
    assert made.candidates(task(4), []) == [Blas(), *ALGORITHMS[:2], WRONG, FINE]
    skinny, wide = Skinny(8, 8, 64, 1, 3, 4, 64), Wide(64, 64, 64, 1, 3, 4, 64)
    beside = [skinny, ALGORITHMS[3], wide, None, Blas()]
    assert made.candidates(task(24, whole=False), beside) == [skinny, Blas(), *ALGORITHMS[:2]]


def test_variants_of_attention_are_put_in_place(made: Any) -> None:
    shape = asked_attention(share(), 4)
    assert shape is not None
    one, variant = Task(4, shape, True, True, EFFORT, 1.0), DecodeVariant(True, 32, 3, 1)
    assert made.candidates(one, [])[0] is None
    assert made.current(one) is None
    assert made.bench(one).brief_us(variant, 4) > 0
    assert made.current(one) == variant
    made.keep(one, None)
    assert made.current(one) is None


def test_an_error_that_takes_the_gpu_along_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    with pytest.raises(ValueError, match="a compiler's"), runner._alive(device):
        raise ValueError("a compiler's")

    def lost(device: torch.device | None = None) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    with pytest.raises(runner.DeviceLost, match="illegal memory access"), runner._alive(device):
        raise ValueError("a launch's")


def test_layers_share_kv_where_each_alone_is_more_than_caches_hold(made: Any) -> None:
    layers = runner.ModelLayers(share(), made._kernels)
    assert layers.step(2) is layers.step(2)
    hidden = layers.step(2)()
    assert torch.equal(hidden, layers.step(2)()), "always the same input"
    assert layers.step(3)().shape[0] == 3


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ("qwen3-0.6b", "2", "products", "4", "512"),
            {"3072x1024": 2, "2048x1024": 2, "1024x1536": 2, "1024x1024": 2, "75968x1024": 1},
        ),
        (("qwen3-30b-a3b", "2", "attention", "8"), {"8x128": 1}),
    ],
)
def test_the_nvidia_kernels_take_candidates_inside_a_models_layers(
    arguments: tuple[str, ...], expected: dict[str, int]
) -> None:
    """On torch's meta device: launches go as far as a GPU would be needed."""
    ran = python("tests.launch.tune.runner_without_gpu", *arguments)
    assert ran.returncode == 0, ran.errors[-3000:]
    lines = [line.split("\t") for line in ran.output.splitlines()]
    assert Counter(key.split()[2] for key, *_ in lines) == expected
    candidates, kernels = (max(int(line[column]) for line in lines) for column in (1, 2))
    assert candidates >= 4
    assert kernels >= 4, "candidates are kernels of their own"
