"""Tasks on the GPU: products and decode attention inside decoder layers of the model itself, or a product alone.

Knows: the layers (dummy weights, so many of them that no cache holds them), their KV, how a candidate is put in place
and compared with the others. Does not know: rounds, or what is chosen (tuner.py).

In place, a kernel finds another cache and other launches around it than alone. Candidates are compared by the output of
all layers with that of the current choices: one that computes something else is left out, however fast.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice

import torch
from torch import Tensor

from launch.tune.journal import AnyChoice
from launch.tune.plan import Task
from launch.tune.shapes import PAGE, RankShare, caches_of, layers_enough, recording_ops, step_inputs
from launch.tune.tuner import DeviceLost
from models.kernels.attention.decode_variant import DecodeVariant, candidate_variants, nearest_variant
from models.kernels.matmul.autotune import ColdProduct, captured, median_graph_us, replay_for
from models.kernels.matmul.choice_table import Blas, Choice, CublasLt, Decoded, Gemv, LinearShape, Scaled, Skinny, Wide
from models.ops.nvidia import NvidiaOps
from models.weights import load_model

TOKENS = 640  # of each row: the mean of a fixed batch of 512 + 257
_COLD_WEIGHTS = 800 << 20  # bytes of all layers, several times the L2
_COLD_KV = 400 << 20
_MOST_OFF = 0.2  # of the norm: several layers of bfloat16, where near ties of experts may fall otherwise
_MOST_OFF_ALONE = 0.02
_MOST_OFF_QUANTISED = 0.06  # of activations with three bits after the first; SiLU-mul multiplies two of them


class WrongResult(RuntimeError):
    """A candidate that computes something else than the others."""


class GpuRunner:
    """Of one rank's share of a model. Loads the layers when the first task asks for them."""

    def __init__(self, share: RankShare, kernels: NvidiaOps) -> None:
        self._share, self._kernels, self._device = share, kernels, kernels.device
        self._layers: ModelLayers | None = None

    def current(self, task: Task) -> AnyChoice:
        if isinstance(task.what, LinearShape):
            return self._kernels.matmul.choice(task.what)
        return nearest_variant(self._kernels.matmul.choices.attention, task.what)

    def candidates(self, task: Task, beside: Sequence[AnyChoice]) -> list[AnyChoice]:
        if not isinstance(task.what, LinearShape):
            return [None, *candidate_variants()]
        matmul = self._kernels.matmul
        found: list[AnyChoice] = [*matmul.candidates(task.what)]
        algorithms = [choice for choice in found if isinstance(choice, CublasLt)]
        if not task.whole:  # cuBLASLt has algorithms for these rows; of our kernels, those that were fast near them
            own = [one for one in beside if isinstance(one, Gemv | Skinny | Wide) and matmul.can_run(task.what, one)]
            found = [*own, *(one for one in found if isinstance(one, Blas | CublasLt | Scaled | Decoded))]
        late = set(islice(algorithms, task.effort.algorithms, None))
        return [choice for choice in found if choice not in late]

    def bench(self, task: Task) -> InLayers | Alone:
        if not task.in_layers:
            assert isinstance(task.what, LinearShape)
            return Alone(self._kernels, task.what)
        if self._layers is None:
            self._layers = ModelLayers(self._share, self._kernels)
        return InLayers(self._layers, task, self._put, self.current(task))

    def keep(self, task: Task, choice: AnyChoice) -> None:
        self._put(task, choice)

    def _put(self, task: Task, choice: AnyChoice) -> None:
        matmul = self._kernels.matmul
        if isinstance(task.what, LinearShape):
            if choice is not None and not isinstance(choice, DecodeVariant):
                matmul.choose(task.what, choice)
            return
        if isinstance(choice, DecodeVariant):
            matmul.choices.attention[task.what.key] = choice
        else:
            matmul.choices.attention.pop(task.what.key, None)
        self._kernels.forget()


class ModelLayers:
    """The first layers of a model with dummy weights, and steps of any number of rows through them."""

    def __init__(self, share: RankShare, kernels: NvidiaOps) -> None:
        self.device = kernels.device
        share = share.cut(max(layers_enough(share), _layers_beyond_caches(share)))
        context = share.context(kernels)
        self.model = load_model(
            share.config,
            None,
            load_format="dummy",
            dtype=share.dtype,
            device=self.device,
            collectives=context.collectives,
            kernels=kernels,
            experts=context.experts,
        )
        self.count = share.config.layers
        self._rows = 0
        self._step: Callable[[], Tensor] | None = None
        self._banks: list[Tensor] = []

    def step(self, rows: int) -> Callable[[], Tensor]:
        """The layers' forward pass over ``rows`` rows of TOKENS tokens, [rows, N]; always the same input, and the same
        result after ``forget``."""
        if self._step is None or self._rows != rows:
            self._step = None  # its caches first
            self._rows, self._step = rows, self._steps(rows)
        return self._step

    def forget(self) -> None:
        """Zero what recurrent layers keep of earlier steps: each step continues where the one before it ended."""
        for bank in self._banks:
            bank.zero_()

    def _steps(self, rows: int) -> Callable[[], Tensor]:
        model = self.model
        torch.manual_seed(0)
        layout = model.cache_layout
        inputs = step_inputs(model, rows, TOKENS, model.config.max_length, self.device)
        pages = rows * -(-TOKENS // PAGE) + 1
        one = max(1, min((group.page_bytes // len(group.layers) * pages for group in layout.groups(PAGE)), default=1))
        distinct = max(2, -(-_COLD_KV // one))  # as many layers have separate KV as it takes to be cold
        caches = caches_of(layout, pages, self.device, slots=rows + 1, distinct=distinct)
        self._banks = [bank for view in caches if isinstance(view, Mapping) for bank in view.values()]

        def run() -> Tensor:
            with torch.no_grad():
                hidden_TN: Tensor = model(inputs, caches)
            return hidden_TN

        return run


def _layers_beyond_caches(share: RankShare) -> int:
    with torch.device("meta"):
        layers = share.cut(1).skeleton(recording_ops(Counter())).layers
    held = sum(parameter.numel() * parameter.element_size() for parameter in layers.parameters())
    return -(-_COLD_WEIGHTS // max(1, held))


class InLayers:
    """A task between the other kernels of its step; microseconds are of one layer."""

    def __init__(
        self, layers: ModelLayers, task: Task, put: Callable[[Task, AnyChoice], None], current: AnyChoice
    ) -> None:
        self._layers, self._task, self._put = layers, task, put
        self._run = layers.step(task.rows)
        self._expected = self._run_once(current)

    def brief_us(self, choice: AnyChoice, replays: int) -> float:
        with _alive(self._layers.device):
            _check(self._run_once(choice), self._expected, _MOST_OFF)
            return median_graph_us(self._run, self._layers.device, replays) / self._layers.count

    def lasting_us(self, choice: AnyChoice, seconds: float) -> float:
        with _alive(self._layers.device):
            self._put(self._task, choice)
            return replay_for(captured(self._run), seconds) / self._layers.count

    def _run_once(self, choice: AnyChoice) -> Tensor:
        self._put(self._task, choice)
        self._layers.forget()
        result = self._run()
        torch.cuda.synchronize(self._layers.device)
        return result


class Alone:
    """A product alone, with weights that no cache holds; microseconds are of one product, its norm included.

    Results are compared without the norm, and of x as it was: a norm changes its residual in every run, and in large
    steps x, too.
    """

    def __init__(self, kernels: NvidiaOps, shape: LinearShape) -> None:
        self._device, self._matmul, self._gate_up = kernels.device, kernels.matmul, shape.gate_up
        self._product = ColdProduct(shape, kernels.matmul.runner(shape), kernels.device)
        self._x = self._product.x.clone()
        plain = Blas() if shape.stored is None else Decoded()
        self._most_off = _MOST_OFF_ALONE if shape.stored is None else _MOST_OFF_QUANTISED
        self._expected = self._plain(plain)
        self._product.warm_up(plain)  # else the first candidates find another clock than the last

    def brief_us(self, choice: AnyChoice, replays: int) -> float:
        with _alive(self._device):
            _check(self._plain(_of_a_product(choice)), self._expected, self._most_off)
            self._product.one(_of_a_product(choice))
            return self._product.brief_us(_of_a_product(choice), replays)

    def lasting_us(self, choice: AnyChoice, seconds: float) -> float:
        with _alive(self._device):
            return self._product.lasting_us(_of_a_product(choice), seconds)

    def _plain(self, choice: Choice) -> Tensor:
        return self._matmul.run(self._x, self._product.weights[0], choice, gate_up=self._gate_up)


@contextmanager
def _alive(device: torch.device) -> Iterator[None]:
    """An error that leaves the GPU unusable to this process is a DeviceLost; others pass."""
    try:
        yield
    except Exception as error:
        try:
            torch.cuda.synchronize(device)
        except RuntimeError as lost:
            raise DeviceLost(str(lost)) from error
        raise


def _of_a_product(choice: AnyChoice) -> Choice:
    assert choice is not None
    assert not isinstance(choice, DecodeVariant)
    return choice


def _check(found: Tensor, expected: Tensor, most: float) -> None:
    """Raises WrongResult."""
    off = float((found.float() - expected.float()).norm() / expected.float().norm())
    if not off <= most:  # NaN is not
        raise WrongResult(f"its result is off by {off:.1e} of the norm")
