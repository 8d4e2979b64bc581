"""Decode TPOT at tensor-parallel sizes that no machine was there for, derived from what was measured at 1 and 2.

Knows: shapes, the measurements in derive_tp_h200.json (or another file of that form), which all-reduce a size of
message takes. Does not know: engines; kernels of shards as small as those of TP 4 and 8, which nobody has timed.

A step is the sum of four parts:

* weights: those of a rank, at the bytes/s that the products reach at so many rows at TP 1;
* KV: that of a rank, at one rate (fitted);
* calls: 2 a layer and one, each an all-reduce with residual add and RMSNorm, at TP 1 the norm alone;
* rest: the same time a layer whatever the rank's share (fitted): what starts and ends of kernels cost.

The two fitted constants are those with the least sum of squared relative errors over the measured steps. From an
all-reduce on two ranks to one on more: what a GPU sends besides takes the link's time, and each further step of
NCCL's ring the time that NCCL's own cost model gives it. The kernel sends its part to all others at once.

``python -m tests.gpu.derive_tp`` prints the tables of docs/measurements.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from launch.bench_roofline import Floor, Shape, decode_floor
from parallel.symmetric import _LIMIT_BYTES

MEASURED = Path(__file__).with_name("derive_tp_h200.json")
SHAPES = Path(__file__).resolve().parents[2] / "models" / "shapes"
MODELS = ("qwen3-8b", "qwen3-32b")  # dense ones: products of experts were measured elsewhere
VALUE_BYTES = 2  # bfloat16


class Step(NamedTuple):
    model: str
    tp: int
    batch: int


@dataclass(frozen=True, slots=True)
class Parts:
    """Of one decode step, milliseconds. ``nccl``: whether NCCL sums it."""

    weights: float
    kv: float
    calls: float
    rest: float
    nccl: bool

    @property
    def tpot(self) -> float:
        return self.weights + self.kv + self.calls + self.rest


class Fitted(NamedTuple):
    kv_bytes_per_s: float
    rest_us_a_layer: float


class Derivation:
    """What a file of measurements says about a step. ``one_launch``: no message is too large for the kernel."""

    def __init__(self, measured: dict[str, Any], *, one_launch: bool = False) -> None:
        self.measured = measured
        self.one_launch = one_launch
        self.steps = {Step(one["model"], one["tp"], one["batch"]): float(one["tpot_ms"]) for one in measured["steps"]}

    def fit(self, tps: Sequence[int]) -> Fitted:
        """To the measured steps of these sizes. Raises ValueError where they are too few for two constants."""
        steps = {step: tpot for step, tpot in self.steps.items() if step.tp in tps}
        batches = {step.batch for step in steps}
        if len(batches) < 2:
            raise ValueError(f"TP {list(tps)}: steps of {len(batches)} batch sizes were measured, two constants need 2")
        terms = [(self._floor(step).kv_bytes, layers_of(step.model)) for step in steps]
        left = [tpot - self._weights(step) - self._calls(step)[0] for step, tpot in steps.items()]
        weigh = 1 / np.array(list(steps.values()))
        solved, *_ = np.linalg.lstsq(np.array(terms) * weigh[:, None], np.array(left) * weigh, rcond=None)
        return Fitted(1e3 / float(solved[0]), 1e3 * float(solved[1]))

    def derive(self, step: Step, fitted: Fitted) -> Parts:
        calls, nccl = self._calls(step)
        return Parts(
            weights=self._weights(step),
            kv=1e3 * self._floor(step).kv_bytes / fitted.kv_bytes_per_s,
            calls=calls,
            rest=1e-3 * fitted.rest_us_a_layer * layers_of(step.model),
            nccl=nccl,
        )

    def _floor(self, step: Step) -> Floor:
        """For its bytes, a rank's; its seconds are not used."""
        shape, length = Shape.from_folder(SHAPES / step.model), self.measured["tokens_a_row"]
        return decode_floor(
            shape,
            batch=step.batch,
            length=length,
            ranks=step.tp,
            value_bytes=VALUE_BYTES,
            bytes_per_s=1,
            flop_per_s=1,
        )

    def _weights(self, step: Step) -> float:
        """Milliseconds. Arithmetic a byte depends on the rows alone, so one rate serves all shapes."""
        products = self.measured["products"]
        whole = VALUE_BYTES * Shape.from_folder(SHAPES / products["model"]).dense
        layer_us = interpolated(step.batch, products["rows"], products["layer_us"])
        head_us = interpolated(step.batch, products["rows"], products["head_us"])
        whole_us = layers_of(products["model"]) * layer_us + head_us
        return 1e-3 * whole_us * self._floor(step).weight_bytes / whole

    def _calls(self, step: Step) -> tuple[float, bool]:
        """Milliseconds of all calls of a step, and whether NCCL serves them."""
        calls, row_bytes = 2 * layers_of(step.model) + 1, VALUE_BYTES * config(step.model)["hidden_size"]
        all_reduce, norm = self.measured["all_reduce"], self.measured["norm"]
        if step.tp == 1:
            return 1e-3 * calls * interpolated(step.batch, norm["rows"], norm["us"]), False
        size = step.batch * row_bytes
        rows = size / all_reduce["row_bytes"]  # as many bytes in rows as they were measured
        link_us = size / (1e3 * all_reduce["link_gb_per_s"])
        if self.one_launch or size <= _LIMIT_BYTES[step.tp]:
            us = interpolated(rows, all_reduce["rows"], all_reduce["one_launch_us"])
            return 1e-3 * calls * (us + (step.tp - 2) * link_us), False
        ring_steps, sent = 2 * (step.tp - 1), 2 * (step.tp - 1) / step.tp  # on two ranks 2 steps, and it all once
        us = interpolated(rows, all_reduce["rows"], all_reduce["nccl_us"])
        us += (sent - 1) * link_us + (ring_steps - 2) * all_reduce["nccl_ring_step_us"]
        return 1e-3 * calls * us, True


def interpolated(at: float, rows: Sequence[float], us: Sequence[float]) -> float:
    """Raises ValueError outside of what was measured."""
    if not rows[0] <= at <= rows[-1]:
        raise ValueError(f"{at:g} rows lie outside of the measured {rows[0]} to {rows[-1]}: change --batch-size")
    return float(np.interp(at, rows, us))


def config(model: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((SHAPES / model / "config.json").read_text(encoding="utf-8"))
    return read


def layers_of(model: str) -> int:
    return int(config(model)["num_hidden_layers"])


def check_table(derivation: Derivation) -> Iterator[str]:
    """Derived against measured; errors are (derived - measured) / measured."""
    fitted, alone = derivation.fit([1, 2]), derivation.fit([1])
    yield "| model | TP | batch | measured, ms | derived, ms | error | error, constants fitted to TP 1 alone |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for step, tpot in derivation.steps.items():
        parts, error = derivation.derive(step, fitted), derivation.derive(step, alone).tpot / tpot - 1
        yield (
            f"| {step.model} | {step.tp} | {step.batch} | {tpot:.2f} | {parts.tpot:.2f} | "
            f"{parts.tpot / tpot - 1:+.1%} | {error:+.1%} |"
        )


def derived_table(derivation: Derivation, steps: Sequence[Step]) -> Iterator[str]:
    fitted = derivation.fit([1, 2])
    yield "| model | TP | batch | derived TPOT, ms | weights | KV | all-reduces with norm | rest | summed by |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |"
    for step in steps:
        parts = derivation.derive(step, fitted)
        summed_by = "NCCL" if parts.nccl else "one launch"
        yield (
            f"| {step.model} | {step.tp} | {step.batch} | **{parts.tpot:.2f}** | {parts.weights:.2f} | "
            f"{parts.kv:.2f} | {parts.calls:.2f} | {parts.rest:.2f} | {summed_by} |"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Decode TPOT derived from measurements at TP 1 and 2, not measured.")
    parser.add_argument("--measured", type=Path, default=MEASURED, help="a file of the form of %(default)s")
    parser.add_argument("--model", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--tp", nargs="+", type=int, choices=[1, 2, 4, 8], default=[4, 8])
    parser.add_argument("--batch-size", nargs="+", type=int, default=[1, 8, 32, 128, 256])
    parser.add_argument("--one-launch", action="store_true", help="as if no message were too large for the kernel")
    options = parser.parse_args(arguments)
    derivation = Derivation(json.loads(options.measured.read_text(encoding="utf-8")), one_launch=options.one_launch)
    steps = [Step(model, tp, batch) for model in options.model for tp in options.tp for batch in options.batch_size]
    fitted = derivation.fit([1, 2])
    print(f"Fitted: KV at {fitted.kv_bytes_per_s / 1e12:.2f} TB/s, {fitted.rest_us_a_layer:.1f} us a layer.\n")
    print(*check_table(derivation), "", "Derived, not measured:", "", *derived_table(derivation, steps), sep="\n")


if __name__ == "__main__":
    main()
