"""Measures of the code base: lines by area, long files and functions, import circles, files per turn, words.

Knows: what is measured, and the aim of each measure. Does not know: earlier values (the baseline file has them).

    python tests/tools/measure.py           print name, value, aim (from the root of the project; standard library only)
    ... --trace         instead the files and stays of a decode turn of the demo model: needs torch
    ... --write FILE    write the values into the baseline FILE; its features, loans and other values stay
    ... --check FILE    exit with 1 where a frozen value is worse than the baseline

A stay: the time between two moves of control, by a call or a return, from one file of the project to another.

The baseline (tests/tools/baseline.json): {"values": {name: value}, "features": [{"name": ..., "lines": ..., "commit":
...}], "loans": [{"step": ..., "measure": ..., "amount": ..., "repaid by": ...}]}. `source lines` and `code lines` may
exceed the baseline by the lines of its features. A loan raises the limit of one measure until a later step repays it.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

PROMPTS = 10  # of a traced run
ROOT = Path()  # the files' names are relative to it
PACKAGES = ("launch", "runtime", "models", "parallel")
NOT_HOST = "runtime/execute/device/"  # the device, or its twin on a CPU
# A file belongs to the first area with a prefix of its path; all other files are core.
AREAS = {
    "tools": """launch/bench launch/sweep launch/tune launch/doctor
        models/kernels/bandwidth_probe""",
    "doors": """launch/serve launch/daemon launch/chat launch/generate launch/api launch/complete
        runtime/daemon runtime/client_socket runtime/frontend/engine_server runtime/frontend/api_links
        runtime/frontend/remote_engine runtime/frontend/serve_messages runtime/frontend/async_engine""",
    "variants": """runtime/speculate runtime/speculative_config runtime/window_costs runtime/groups models/drafters
        runtime/schedule/speculation runtime/schedule/snapshots runtime/schedule/sessions runtime/execute/proposer
        runtime/execute/sampling/rejection runtime/execute/sampling/draft_tree runtime/execute/sampling/acceptance
        runtime/execute/step/window_io_triton runtime/execute/step/drafts
        models/kernels/recurrent models/layers/gated_delta models/layers/mamba2
        models/layers/delta_config models/layers/conv_state models/layers/layer_tap models/ops/rows_nvidia/recurrent
        models/ops/rows_reference/recurrent models/ops/rows_reference/invariant
        models/kernels/attention/invariant models/kernels/matmul/invariant models/kernels/attention/decode_window
        parallel/comm/ep_exchange
        parallel/comm/symmetric_exchange parallel/comm/ordered_all_reduce parallel/control/protocol/max_rounds
        models/families/qwen3_next models/families/qwen3_5 models/families/nemotron_h models/block_pattern""",
}
# Words for which the field has others: "draft token" instead of "guess". Only words that rarely mean anything else.
DIALECT = r"""nobody|anybody|somebody|whoever|told|tells|tell|hears?|heard|guess(?:es|ed|ing)?|rows? that decodes?
    chunks? of prompts?|tak(?:es?|en) in|beside|behind|befell|likeliest|goes on|let in|of its own|of their own"""
AIMS: dict[str, float] = {
    "source lines": 65_000, "code lines": 47_000, "files > 400 lines": 8, "functions > 60 lines": 45,
    "host functions > 60 lines": 0, "files in import circles": 0, "instruments, lines": 5_500, "test lines": 77_000,
    "README words": 900, "CHANGELOG lines": 40, "documents' words": 45_000, "dialect words": 600,
    "files of a turn, one rank": 18, "files of a turn, leader of two": 23,
    "stays of a turn, one rank": 60, "stays of a turn, leader of two": 85,
}  # fmt: skip
# Never worse than the baseline; the other measures are reported only.
FROZEN = """source lines|code lines|host functions > 60 lines|files in import circles|README words|CHANGELOG lines
    dialect words|files of a turn, one rank|files of a turn, leader of two|stays of a turn, one rank
    stays of a turn, leader of two""".replace("\n", "|")


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def lines(path: Path) -> int:
    return path.read_text(encoding="utf-8").count("\n")


def code_lines(path: Path, tree: ast.Module) -> int:
    """Lines that hold code: not blank, no comment alone, no docstring."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docs: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None:
            docs |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    text = path.read_text(encoding="utf-8").splitlines()
    code = (line for at, line in enumerate(text, 1) if at not in docs)
    return sum(bool(line.strip()) and not line.lstrip().startswith("#") for line in code)


def words(paths: list[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").split()) for path in paths)


def imported(tree: ast.Module, modules: dict[str, Path]) -> set[Path]:
    """Files that importing this one imports: no imports under TYPE_CHECKING or inside functions."""
    found: set[Path] = set()
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            begin = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            names = [begin.rstrip("."), *(begin + alias.name for alias in node.names)]
            found |= {modules[name] for name in names if name in modules}
    return found


def in_circle(path: Path, graph: dict[Path, set[Path]]) -> bool:
    seen, todo = set[Path](), [*graph[path] - {path}]
    while todo:
        if (other := todo.pop()) not in seen:
            seen.add(other)
            todo += graph[other]
    return path in seen


def prose(path: Path) -> str:
    """The English of a file: all of a document; the comments and triple-quoted strings of code."""
    text = path.read_text(encoding="utf-8")
    return text if path.suffix == ".md" else "\n".join(re.findall(r'""".*?"""|#[^\n]*', text, re.DOTALL))


def measure() -> dict[str, float]:
    files = [*sources(*PACKAGES), ROOT / "lockstride.py"]
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in files}
    sizes = {path: lines(path) for path in files}
    by_area, total = Counter[str](), sum(sizes.values())
    for path, size in sizes.items():
        named = (area for area, begins in AREAS.items() if path.as_posix().startswith(tuple(begins.split())))
        by_area[next(named, "core")] += size
    found: dict[str, float] = {"source files": len(files), "source lines": total}
    found["code lines"] = sum(code_lines(path, tree) for path, tree in trees.items())
    found |= {f"{name}, lines": by_area[name] for name in ("core", *AREAS)}
    found["core, % of source"] = round(100 * by_area["core"] / total, 1)
    found["files > 400 lines"] = sum(size > 400 for size in sizes.values())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    functions = [(path, node) for path, tree in trees.items() for node in ast.walk(tree) if isinstance(node, kinds)]
    long = [path for path, node in functions if (node.end_lineno or 0) - node.lineno >= 60]
    found["functions > 60 lines"] = len(long)
    found["host functions > 60 lines"] = sum("triton" not in p.name and "kernels" not in p.parts for p in long)
    modules = {p.as_posix()[:-3].removesuffix("/__init__").replace("/", "."): p for p in files}
    graph = {path: imported(tree, modules) for path, tree in trees.items()}
    found["files in import circles"] = sum(in_circle(path, graph) for path in graph)
    instruments, documents = sources("tests/tools", "tests/bench", "docs"), sorted((ROOT / "docs").rglob("*.md"))
    tests = [path for path in sources("tests") if path not in instruments]
    lab = [path for path in documents if re.match(r"docs/(lab|log|measurements)\b", path.as_posix())]
    readers = [*(path for path in documents if path not in lab), ROOT / "README.md"]
    found |= {"instruments, lines": sum(map(lines, instruments)), "test lines": sum(map(lines, tests))}
    found |= {"README words": words([ROOT / "README.md"]), "CHANGELOG lines": lines(ROOT / "CHANGELOG.md")}
    found |= {"documents' words": words(readers[:-1]), "lab's words": words(lab)}
    pattern = re.compile(rf"\b(?:{'|'.join(part.strip() for part in DIALECT.splitlines())})\b", re.IGNORECASE)
    found["dialect words"] = sum(len(pattern.findall(prose(path))) for path in (*files, *readers))
    return found


def trace(ranks: int) -> tuple[int, int]:
    """(files, stays) of the most frequent turn on rank 0, over a few of the demo's prompts: host code from one engine
    step to the next."""
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path("models/demo/prompts.jsonl").read_text().splitlines(keepends=True)
        Path(folder, "in").write_text("".join(prompts[:PROMPTS]))
        demo = ["--model", "models/demo", "--input", f"{folder}/in", "--output", f"{folder}/out"]
        start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
        command = [sys.executable, *start, __file__, "--inside", folder, "generate", *demo]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, **quiet)  # type: ignore[call-overload]
        turns = json.loads(Path(folder, "turns.0.json").read_text())
    usual, _ = Counter(tuple(files) for files, _ in turns).most_common(1)[0]
    stays = sorted(stays for files, stays in turns if tuple(files) == usual)
    return len(usual), stays[len(stays) // 2]


def inside(folder: str, argv: list[str]) -> int:
    """One rank, watched. A stay ends where control passes, by a call or a return, to another file of the project."""
    turns: list[tuple[set[str], list[str]]] = []
    known: dict[str, str] = {}

    def watch(frame: Any, event: str, _: object) -> None:
        if event not in ("call", "return"):
            return
        seen = frame if event == "call" else frame.f_back
        path = seen.f_code.co_filename if seen is not None else ""
        if path not in known:
            name = path.removeprefix(f"{ROOT.resolve()}/")
            known[path] = name if name.startswith(PACKAGES) and not name.startswith(NOT_HOST) else ""
        if event == "call" and known[path] == "runtime/engine.py" and frame.f_code.co_name == "step":
            turns.append((set(), []))
        if turns and known[path]:
            files, stays = turns[-1]
            files.add(known[path])
            if not stays or stays[-1] != known[path]:
                stays.append(known[path])

    sys.path.insert(0, str(ROOT.resolve()))
    sys.argv = ["launch", *argv]
    from runtime.engine import Engine

    step = Engine.step

    def first_step(engine: Engine, *given: Any, **named: Any) -> Any:
        Engine.step = step  # type: ignore[method-assign]
        sys.setprofile(watch)  # not before: most calls are made by imports
        return step(engine, *given, **named)

    Engine.step = first_step  # type: ignore[method-assign, assignment]
    try:
        runpy.run_module("launch", run_name="__main__")
    finally:
        sys.setprofile(None)
        kept = json.dumps([(sorted(files), len(stays)) for files, stays in turns])
        Path(folder, f"turns.{os.environ.get('RANK', '0')}.json").write_text(kept)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--check", type=Path)
    args = parser.parse_args()
    found = {} if args.trace else measure()
    for ranks, who in ((1, "one rank"), (2, "leader of two")) if args.trace else ():
        found[f"files of a turn, {who}"], found[f"stays of a turn, {who}"] = trace(ranks)
    for name, value in found.items():
        print(f"{name:32} {value:>10,g} {AIMS.get(name, ''):>10}")
    path = args.check or args.write
    baseline = json.loads(path.read_text()) if path and path.exists() else {}
    before, features = baseline.get("values", {}), baseline.get("features", [])
    booked = sum(feature["lines"] for feature in features)
    frozen = {name.strip() for name in FROZEN.split("|")} & found.keys()
    of_features = {name: booked if name in ("source lines", "code lines") else 0 for name in frozen}
    allowed = {name: before[name] + of_features[name] for name in sorted(frozen & before.keys())}
    for loan in baseline.get("loans", []):
        allowed[loan["measure"]] = allowed.get(loan["measure"], 0) + loan["amount"]
    worse = [name for name in allowed if found.get(name, 0) > allowed[name]]
    if args.write:  # without the lines of features, which stay booked; what is better than its aim has room up to there
        kept = {name: max(found[name] - of_features[name], AIMS.get(name, 0)) for name in frozen}
        values = before | found | kept
        args.write.write_text(json.dumps({**baseline, "values": values, "features": features}, indent=1) + "\n")
        return 0
    for name in worse if args.check else ():
        print(f"{name}: {allowed[name]:g} allowed by the baseline, {found[name]:g} now", file=sys.stderr)
    return int(bool(args.check and worse))


if __name__ == "__main__":
    sys.exit(inside(sys.argv[2], sys.argv[3:]) if sys.argv[1:2] == ["--inside"] else main())
