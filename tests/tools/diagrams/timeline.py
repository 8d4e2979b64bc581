"""Draws docs/chained-timeline.svg: the same requests through the serial engine and through a chain of depth 2.

    python -m tests.tools.diagrams.timeline           rewrites it (make diagram)
    python -m tests.tools.diagrams.timeline --check   exit code 1 when it is not current

Knows: a made-up cost of planning, landing and running a step, and how the picture looks. What runs in which step is
the real scheduler's choice. Does not know: any measured time; those are in docs/measurements.md.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from dataclasses import dataclass
from xml.sax.saxutils import escape

from runtime.schedule.config import SchedulerConfig, StepLimits
from runtime.schedule.plan import StepKind, StepResult
from runtime.schedule.scheduler import Scheduler
from tests.tools.diagrams.drawn import DOCS
from tests.tools.diagrams.scripted_device import Part, ScriptedDevice

PICTURE = DOCS / "chained-timeline.svg"

# Times are in pixels. The host's share is drawn large, so that it can be seen.
PLAN, LAND, DECODE, PREFILL = 15, 17, 76, 104
END = 872
LEFT, WIDTH = 76, 960
PARTS = (
    Part("A", prompt=3, max_tokens=40),
    Part("B", prompt=2, max_tokens=40, stops_after=3),
    Part("C", prompt=3, max_tokens=40, arrives=250),
)


# ---- what happens when ----


@dataclass(frozen=True)
class Box:
    """Something that takes from ``start`` to ``end``. ``rows``: (request, whether a ghost) of a device step."""

    what: str
    step: int
    start: float
    end: float
    rows: tuple[tuple[str, bool], ...] = ()


def play(depth: int) -> list[Box]:
    """The engine's loop against a clock of pixels: everything that starts before END."""
    scheduler = Scheduler(SchedulerConfig(StepLimits(2, 4, block_size=4, max_model_len=64, depth=depth), blocks=64))
    device = ScriptedDevice(PARTS)
    in_flight: deque[tuple[StepResult, float]] = deque()
    boxes: list[Box] = []
    arrived: set[int] = set()
    now = device_free = 0.0
    while now < END:
        for request_id, part in enumerate(PARTS):
            if part.arrives <= now and request_id not in arrived:
                arrived.add(request_id)
                scheduler.submit(device.arrival(request_id))
        plan = scheduler.plan()
        if plan is None:
            raise AssertionError("the story has work for every step")
        boxes.append(Box("plan", plan.step, now, now + PLAN))
        now += PLAN
        start = max(now, device_free)
        prefill = plan.kind is StepKind.PREFILL
        device_free = start + (PREFILL if prefill else DECODE)
        boxes.append(Box("prefill" if prefill else "decode", plan.step, start, device_free, tuple(device.rows(plan))))
        in_flight.append((device.run(plan), device_free))
        if len(in_flight) > depth:
            result, done = in_flight.popleft()
            now = max(now, done)
            scheduler.land(result.step, result)
            boxes.append(Box("land", result.step, now, now + LAND))
            now += LAND
    return boxes


# ---- how it looks ----

STYLE = """
  text { font: 12px -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328 }
  .title { font-size: 15px; font-weight: 600 }
  .quiet { fill: #59636e }
  .note { font-size: 12px; fill: #0550ae }
  .small { font-size: 10px }
  .card { fill: #ffffff; stroke: #d1d9e0 }
  .lane { stroke: #d1d9e0 }
  .plan { fill: #d8c7f5; stroke: #8250df }
  .land { fill: #c8e6c9; stroke: #1a7f37 }
  .decode { fill: #cfe4ff; stroke: #0969da }
  .prefill { fill: #ffe2b8; stroke: #bc6c00 }
  .idle { fill: url(#hatch); stroke: #cf222e; stroke-dasharray: 3 2 }
  .hatch { stroke: #cf222e; stroke-width: 1 }
  .row { fill: #ffffff; stroke: #59636e }
  .ghost { fill: none; stroke: #59636e; stroke-dasharray: 2 2 }
  .lead { stroke: #0550ae; fill: none }
"""
DARK = """
  text { fill: #f0f6fc } .quiet { fill: #9198a1 } .note { fill: #79c0ff }
  .card { fill: #0d1117; stroke: #3d444d } .lane { stroke: #3d444d }
  .plan { fill: #3b2a63; stroke: #a371f7 } .land { fill: #12361f; stroke: #3fb950 }
  .decode { fill: #0c2d6b; stroke: #58a6ff } .prefill { fill: #4d2d00; stroke: #e09b13 }
  .idle { stroke: #f85149 } .hatch { stroke: #f85149 }
  .row { fill: #0d1117; stroke: #9198a1 } .ghost { stroke: #9198a1 } .lead { stroke: #79c0ff }
"""
HOST, DEVICE = 34, 40  # heights of the two lanes


class Drawing:
    """SVG elements, one after the other."""

    def __init__(self) -> None:
        self.parts: list[str] = []

    def rect(self, look: str, x: float, y: float, width: float, height: float, radius: float = 3) -> None:
        self.parts.append(
            f'<rect class="{look}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}"/>'
        )

    def text(self, x: float, y: float, text: str, look: str = "", anchor: str = "start") -> None:
        self.parts.append(f'<text class="{look}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>')

    def path(self, look: str, points: str) -> None:
        self.parts.append(f'<path class="{look}" d="{points}"/>')


def draw_lanes(drawing: Drawing, top: float, boxes: list[Box]) -> None:
    """The host's lane, the device's lane under it, and the device's idle time between its steps."""
    device_top = top + HOST + 14
    for name, y, height in (("host", top, HOST), ("device", device_top, DEVICE)):
        drawing.text(16, y + height / 2 + 4, name)
        drawing.path("lane", f"M {LEFT} {y + height + 4} H {LEFT + END}")
    free: float | None = None
    for box in boxes:
        x, end = LEFT + box.start, min(LEFT + box.end, LEFT + END)
        if box.what in ("plan", "land"):
            if end > x + 8:
                drawing.rect(box.what, x, top, end - x, HOST)
                drawing.text((x + end) / 2, top + HOST / 2 + 4, f"{box.step}", "small", "middle")
            continue
        if free is not None and box.start - free > 1 and LEFT + box.start <= LEFT + END:
            drawing.rect("idle", LEFT + free, device_top, box.start - free, DEVICE, 0)
        free = box.end
        if end <= x:
            continue
        drawing.rect(box.what, x, device_top, end - x, DEVICE)
        if LEFT + box.end <= LEFT + END:
            drawing.text((x + end) / 2, device_top + 14, f"step {box.step}", "small", "middle")
            draw_rows(drawing, (x + end) / 2, device_top + 20, box)


def draw_rows(drawing: Drawing, middle: float, y: float, box: Box) -> None:
    x = middle - 10 * len(box.rows)
    for name, ghost in box.rows:
        drawing.rect("ghost" if ghost else "row", x + 1, y, 18, 15)
        drawing.text(x + 10, y + 11, name, "small quiet" if ghost else "small", "middle")
        x += 20


def note(drawing: Drawing, x: float, y: float, text: str, to_y: float) -> None:
    """``text`` at (x, y), and a line straight from it to ``to_y``."""
    drawing.text(x + 5, y + 4, text, "note")
    drawing.path("lead", f"M {x:g} {y:g} V {to_y:g}")


def middle_of(boxes: list[Box], what: tuple[str, ...], step: int) -> float:
    return next(LEFT + (box.start + box.end) / 2 for box in boxes if box.what in what and box.step == step)


def picture() -> str:
    drawing = Drawing()
    serial, chained = play(0), play(2)
    ran = ("decode", "prefill")
    drawing.rect("card", 0.5, 0.5, WIDTH - 1, 399, 8)

    drawing.text(16, 28, "Serial: each step waits for the host to read the one before it", "title")
    draw_lanes(drawing, 44, serial)
    drawing.text(LEFT, 158, "the device idles while the host lands a step and plans the next", "quiet")

    top = 214
    drawing.text(16, 190, "Chained, depth 2: two steps are queued while one runs; no launch waits for a token", "title")
    draw_lanes(drawing, top, chained)
    below = top + HOST + 14 + DEVICE
    ghosts = [box for box in chained if any(ghost for _, ghost in box.rows)]
    joins = next(box for box in chained if any(name == "C" for name, _ in box.rows))
    stop = ghosts[0].step - 1
    note(drawing, middle_of(chained, ran, stop) - 30, below + 40, "B samples its stop token", below)
    ghost_x = LEFT + (ghosts[0].start + ghosts[0].end) / 2
    note(drawing, ghost_x, below + 22, f"{len(ghosts)} ghost rows of B, masked", below)
    note(
        drawing,
        middle_of(chained, ran, joins.step),
        below + 40,
        "C joins while they are in flight, on the same stream",
        below,
    )
    landed = middle_of(chained, ("land",), stop)
    note(drawing, landed, top - 9, f"the host learns of B's end when step {stop} lands", top)

    x = float(LEFT)
    for look, label in (
        ("plan", "host plans step N"),
        ("land", "host lands step N"),
        ("prefill", "prefill"),
        ("decode", "decode"),
        ("ghost", "ghost row"),
        ("idle", "device idle"),
    ):
        drawing.rect(look, x, 372, 16, 14)
        drawing.text(x + 22, 384, label)
        x += 44 + 6.6 * len(label)
    drawing.text(WIDTH - 16, 384, "not to scale", "quiet", "end")

    hatch = (
        '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<path class="hatch" d="M 0 0 V 6"/></pattern></defs>'
    )
    body = "\n".join(drawing.parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} 400" width="{WIDTH}" height="400" role="img" '
        'aria-label="Host and device over time. Serial: the device idles between steps. Chained: it never does.">'
        f"\n<style>{STYLE}  @media (prefers-color-scheme: dark) {{{DARK}  }}\n</style>\n{hatch}\n{body}\n</svg>\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 when the picture is old")
    drawn = picture()
    if parser.parse_args().check:
        return int(PICTURE.read_text() != drawn)
    PICTURE.write_text(drawn)
    return 0


if __name__ == "__main__":
    sys.exit(main())
