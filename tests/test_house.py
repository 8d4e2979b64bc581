"""The rules of the house, read from the syntax trees of the tracked files; each checker is shown to bite."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

LAYERS = ("launch", "runtime", "models", "parallel")  # imports run from left to right
FIRST_PARTY = {*LAYERS, "lockstride", "tests", "docs"}
SEALED = {  # folders that may import the standard library, themselves and what is listed, nothing else
    "runtime/schedule": frozenset[str](),
    "parallel/control": frozenset({"zmq", "msgspec"}),
}
BARE = ("runtime/__init__.py", "parallel/__init__.py")  # executed on the way into a sealed folder

DYNAMIC_IMPORTS = ("__import__", "import_module", "importlib.import_module")

CODE_FROM_DATA = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
FORBIDDEN_ATTRIBUTES = re.compile(
    r"(send|recv)_pyobj|(send|recv|broadcast|scatter|gather|all_gather)_object(_list)?|object_(to|from)_tensor"
)
FORBIDDEN_KEYWORDS = {"trust_remote_code", "allow_pickle"}
EMPTY_NAMES = {"util", "utils", "common", "misc", "helper", "helpers", "types"}
MACHINE_PATH = re.compile(r"(?<![\w.~$}])/(work|root|home)(?=[/\s\"'`:;,)]|$)", re.MULTILINE)


def tracked(root: Path = ROOT) -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, check=True, text=True).stdout
    return sorted(path for path in listed.split("\0") if path and (root / path).is_file())


def python_files(root: Path = ROOT) -> dict[str, ast.Module]:
    """Path relative to ``root`` -> syntax tree, of every tracked Python file."""
    return {path: parsed((root / path).read_text()) for path in tracked() if path.endswith(".py")}


@cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


def dotted(node: ast.expr) -> str:
    """``a.b.c`` of a name or of attributes of one; the last attribute of anything else; nothing of the rest."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}".lstrip(".")
    return ""


def imports_of(path: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every import in the file, wherever it stands; relative and dynamic ones resolved."""
    package = path.split("/")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *(node.module.split(".") if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and dotted(node.func) in DYNAMIC_IMPORTS:
            yield node.lineno, ast.unparse(node.args[0]).strip("'\"")


def uphill_imports(files: dict[str, ast.Module]) -> list[str]:
    """Every import that the law forbids, as ``path:line imports module``."""
    found = []
    for path, tree in files.items():
        layer = path.split("/")[0]
        if layer not in LAYERS:
            continue
        downhill = LAYERS[LAYERS.index(layer) :]
        sealed = next((folder for folder in SEALED if path.startswith(folder + "/")), None)
        for line, module in imports_of(path, tree):
            top = module.split(".")[0]
            allowed = top not in FIRST_PARTY or top in downhill
            if sealed is not None:
                inside = f"{module}.".startswith(sealed.replace("/", ".") + ".")
                allowed = inside or top in sys.stdlib_module_names or top in SEALED[sealed]
            elif path in BARE:
                allowed = top in sys.stdlib_module_names
            if not allowed:
                found.append(f"{path}:{line} imports {module}")
    return found


def code_from_data(files: dict[str, ast.Module]) -> list[str]:
    """Everything that could run code found in data, as ``path:line what``."""
    found = []
    for path, tree in files.items():
        found += [f"{path}:{line} {name}" for line, name in imports_of(path, tree) if opens_pickles(name)]
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and (
                FORBIDDEN_ATTRIBUTES.fullmatch(node.attr)
                or dotted(node) in ("torch.load", "builtins.eval", "builtins.exec")
            ):
                found.append(f"{path}:{node.lineno} {ast.unparse(node)}")
            elif isinstance(node, ast.Name) and (
                node.id in ("eval", "exec") or FORBIDDEN_ATTRIBUTES.fullmatch(node.id)
            ):
                found.append(f"{path}:{node.lineno} {node.id}")
            elif isinstance(node, ast.keyword) and node.arg in FORBIDDEN_KEYWORDS:
                found.append(f"{path}:{node.lineno} {node.arg}")
    return found


def opens_pickles(module: str) -> bool:
    first, *_, last = module.split(".") * 2
    return first in CODE_FROM_DATA or module == "torch.load" or FORBIDDEN_ATTRIBUTES.fullmatch(last) is not None


def silent_files(files: dict[str, ast.Module]) -> list[str]:
    """Files of the four layers whose docstring does not say what they know; an __init__.py may say anything short."""
    silent = []
    for path, tree in files.items():
        doc = ast.get_docstring(tree) or ""
        wanted = len(doc.split()) >= 3 if path.endswith("__init__.py") else re.search(r"\bKnows\b", doc)
        if path.split("/")[0] in LAYERS and not wanted:
            silent.append(path)
    return silent


def lines_with_machine_paths(text: str) -> list[int]:
    return [text.count("\n", 0, match.start()) + 1 for match in MACHINE_PATH.finditer(text)]


def test_imports_run_one_way() -> None:
    assert uphill_imports(python_files()) == []


def test_nothing_runs_code_found_in_data() -> None:
    assert code_from_data(python_files()) == []


def test_every_file_says_what_it_knows() -> None:
    assert silent_files(python_files()) == []


def test_names_say_what_they_hold() -> None:
    paths = [Path(path) for path in tracked() if path.endswith(".py")]
    assert [str(p) for p in paths if EMPTY_NAMES & {p.stem, *p.parent.parts}] == []


def test_no_path_of_one_machine_is_written_down() -> None:
    found = []
    for path in tracked():
        try:
            text = (ROOT / path).read_text(encoding="utf-8")
        except UnicodeDecodeError:  # weights
            continue
        found += [f"{path}:{line}" for line in lines_with_machine_paths(text)]
    assert found == []


@pytest.mark.parametrize("module", ["runtime.schedule.scheduler", "parallel.control"])
def test_sealed_folders_load_no_tensor_library(module: str) -> None:
    program = f"import sys, {module}; print(sorted({{'torch', 'numpy'}} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"


# ---- the checkers bite ----


def test_a_torch_import_planted_in_the_scheduler_is_found(tmp_path: Path) -> None:
    """The whole tree is copied, one line is planted, and exactly that line is found."""
    for path in tracked():
        if path.endswith(".py"):
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, tmp_path / path)
    assert uphill_imports(python_files(tmp_path)) == []
    target = tmp_path / "runtime/schedule/blocks.py"
    target.write_text(target.read_text() + "import torch\n")
    last = len(target.read_text().splitlines())
    assert uphill_imports(python_files(tmp_path)) == [f"runtime/schedule/blocks.py:{last} imports torch"]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("runtime/schedule/queue.py", "def f():\n    import numpy.linalg"),
        ("runtime/schedule/queue.py", "from runtime.execute.device.protocol import Stream"),
        ("runtime/schedule/queue.py", "from ..execute import device"),
        ("runtime/schedule/queue.py", "from runtime import engine"),
        ("runtime/schedule/queue.py", "import importlib\nimportlib.import_module('torch')"),
        ("runtime/schedule/queue.py", "if TYPE_CHECKING:\n    from torch import Tensor"),
        ("runtime/__init__.py", "import torch"),
        ("parallel/control/transport/uds.py", "import torch.distributed"),
        ("parallel/control/transport/uds.py", "from parallel.comm.collectives import SingleRank"),
        ("parallel/layers/linear.py", "from models.inputs import StepInputs"),
        ("models/families/llama.py", "import runtime.schedule.plan"),
        ("runtime/engine.py", "from launch import options"),
        ("runtime/engine.py", "import lockstride"),
    ],
)
def test_an_uphill_import_is_found(path: str, source: str) -> None:
    assert len(uphill_imports({path: ast.parse(source)})) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("runtime/schedule/queue.py", "import heapq\nfrom .sequence import SequenceState"),
        (
            "parallel/control/transport/uds.py",
            "import zmq\nimport msgspec\nfrom parallel.control.wire.frames import Record",
        ),
        ("launch/generate/command.py", "import torch\nfrom models.registry import load\nfrom parallel import shard"),
    ],
)
def test_a_downhill_import_is_fine(path: str, source: str) -> None:
    assert uphill_imports({path: ast.parse(source)}) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from cloudpickle import dumps",
        "x = torch.load(path)",
        "from torch import load",
        "socket.recv_pyobj()",
        "dist.all_gather_object(out, x)",
        "from torch.distributed import broadcast_object_list as b",
        "eval(text)",
        "run = exec",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "np.load(path, allow_pickle=True)",
    ],
)
def test_code_from_data_is_found(source: str) -> None:
    assert len(code_from_data({"launch/x.py": ast.parse(source)})) == 1


def test_what_only_looks_like_it_is_fine() -> None:
    source = "model.eval()\njson.load(file)\nsafetensors.torch.load_file(path)\nname = 'pickle'"
    assert code_from_data({"launch/x.py": ast.parse(source)}) == []


def test_a_silent_file_is_found() -> None:
    files = {"models/x.py": ast.parse('"""Layers."""'), "models/y.py": ast.parse('"""Knows: shapes."""')}
    assert silent_files(files) == ["models/x.py"]


def test_a_machine_path_is_found() -> None:
    for folder in ("work", "root", "home"):
        assert lines_with_machine_paths(f"first\ncd /{folder}/somebody\n") == [2]
    assert lines_with_machine_paths("tests/work/x ~/work $HOME/work/x https://site.org/home and /workspace") == []
