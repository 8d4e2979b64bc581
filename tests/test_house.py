"""The rules of the house, read from the syntax trees of the tracked files; each checker is shown to bite.

Layers and sealed folders. Imports run launch -> runtime -> models -> parallel; a sealed folder imports nothing but what
is listed. Every import counts here, wherever it stands.

Circles and floors. No files import each other in a circle. An import counts wherever it runs, at the top of a file or
inside a function: a file that is loaded later is still needed. What stands under ``if TYPE_CHECKING`` never runs and is
counted apart. Each folder and each loose file of a layer stands on a floor (FLOORS), and imports from its own floor and
those below; here annotations count, too. Whoever adds one says in the table where it stands.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

LAYERS = ("launch", "runtime", "models", "parallel")  # imports run from left to right
FIRST_PARTY = {*LAYERS, "lockstride", "tests"}
SEALED = {  # folders that may import the standard library, themselves and what is listed, nothing else
    "runtime/schedule": frozenset[str](),
    "parallel/control": frozenset({"zmq", "msgspec"}),
}
# What a plan must not depend on, or ranks would differ: times of their own, and draws that no seed of a request makes.
NO_PLAN_DEPENDS_ON = frozenset({"time", "datetime", "random", "secrets", "uuid", "os", "threading", "asyncio"})
# Where an H200's multiprocessors may stand as a number: all else asks the traits of its GPU (docs/decisions/0019).
COUNTS_MULTIPROCESSORS = {"models/kernels/traits.py", "models/kernels/matmul/invariant.py"}
# From the top floor down. A folder's files stand on its floor, unless they are listed themselves. Two of one floor may
# import each other's files, but never in a circle.
FLOORS: dict[str, tuple[tuple[str, ...], ...]] = {
    "launch": (
        ("launch/__main__.py",),
        ("launch/cli.py", "launch/complete.py"),
        ("launch/sweep",),
        ("launch/tune",),
        ("launch/bench",),
        ("launch/generate", "launch/serve", "launch/daemon", "launch/chat", "launch/doctor"),
        ("launch/api", "launch/ranks", "launch/engine_options.py"),
        ("launch/values.py", "launch/errors.py", "launch/options.py"),
    ),
    "runtime": (
        ("runtime/build.py",),
        ("runtime/step_budget.py", "runtime/chain_depth.py", "runtime/window_costs.py", "runtime/model_checks.py"),
        ("runtime/engine.py",),
        ("runtime/daemon",),
        ("runtime/counters.py", "runtime/frontend"),
        ("runtime/groups",),
        ("runtime/observe", "runtime/replicate", "runtime/watchdog"),
        ("runtime/speculate",),
        ("runtime/execute",),
        ("runtime/client_socket.py", "runtime/config.py", "runtime/gc_freeze.py", "runtime/plan_late.py"),
        ("runtime/speculative_config.py",),
        ("runtime/grammar_check.py", "runtime/grammar_tables/maker.py"),
        ("runtime/grammar.py",),
        ("runtime/grammar_tables",),
        ("runtime/schedule", "runtime/number_text.py", "runtime/helper_process.py"),
        ("runtime/watchdog/parent_death.py",),
    ),
    "models": (
        ("models/expert_load.py",),
        ("models/drafters",),
        ("models/weights.py",),
        ("models/fp8_load.py",),
        ("models/four_bit_load.py",),
        ("models/planned_weights.py", "models/four_bit.py"),
        ("models/registry.py", "models/dummy.py"),
        ("models/families",),
        ("models/layers",),
        ("models/group_size.py",),
        ("models/config.py", "models/checkpoint.py"),
        ("models/weights_header.py",),
        (  # read by config.py: what config.json says
            "models/layers/rope.py",
            "models/layers/routed_experts.py",
            "models/layers/delta_config.py",
            "models/quantization.py",
        ),
        ("models/block_pattern.py",),
        ("models/ops",),
        ("models/attention_spec.py", "models/config_reader.py", "models/kernels"),
        ("models/inputs.py",),
        ("models/cache_layout.py", "models/row_buckets.py"),
        ("models/kv_group.py",),
    ),
    "parallel": (
        ("parallel/layers",),
        ("parallel/comm", "parallel/control"),
        ("parallel/topology.py",),
    ),
}
# Circles of imports that stand: none. A new one is an error, and so is a listed one that went.
CIRCLES_THAT_STAND: list[set[str]] = []
CIRCLES_OF_ANNOTATIONS: list[set[str]] = []
ENVIRONMENT = re.compile(r"os\.(environb?|getenvb?|putenv|unsetenv)(\..*)?")
MIRRORED = ("launch", "runtime", "models", "parallel")
ONE_FILE_S_TESTS = {"tests/runtime/engine": "runtime/engine.py"}  # the loop's tests are many: they have a folder

LAYER_FACES = {f"{layer}/__init__.py" for layer in LAYERS}
BARE = ("runtime/__init__.py", "parallel/__init__.py")  # executed on the way into a sealed folder

DYNAMIC_IMPORTS = ("__import__", "import_module", "importlib.import_module")

CODE_FROM_DATA = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
FORBIDDEN_ATTRIBUTES = re.compile(
    r"(send|recv)_pyobj|(send|recv|broadcast|scatter|gather|all_gather)_object(_list)?|object_(to|from)_tensor"
)
FORBIDDEN_KEYWORDS = {"trust_remote_code", "allow_pickle"}
SUSPICIOUS = re.compile(  # in a file that code_from_data finds something in
    r"pickle|dill|joblib|shelve|marshal|_pyobj|_object|object_|trust_remote_code|torch\.load|torch import"
    r"|\b(eval|exec)\b"
)
SPECS_ARE_MADE_IN = "runtime/execute/launch_spec.py"
LAUNCH_PATH = ("runtime/execute/executor.py", "Executor.launch")
A_SCREEN = 40  # lines
EMPTY_NAMES = {"util", "utils", "common", "misc", "helper", "helpers", "types"}
MACHINE_PATH = re.compile(r"(?<![\w.~$}])/(work|root|home)(?=[/\s\"'`:;,)]|$)", re.MULTILINE)


def tracked(root: Path = ROOT) -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, check=True, text=True).stdout
    return sorted(path for path in listed.split("\0") if path and (root / path).is_file())


def python_files(root: Path = ROOT) -> dict[str, ast.Module]:
    """Path relative to ``root`` -> syntax tree, of the Python files that are installed."""
    paths = [path for path in tracked() if path.endswith(".py")]
    return {path: parsed((root / path).read_text()) for path in paths if not path.startswith("tests/")}


def suspicious_files() -> dict[str, ast.Module]:
    """The same of all tracked files with a word in them that ``code_from_data`` looks for."""
    texts = {path: (ROOT / path).read_text() for path in tracked() if path.endswith(".py")}
    return {path: parsed(text) for path, text in texts.items() if SUSPICIOUS.search(text)}


@cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


@cache
def walk(tree: ast.AST) -> list[ast.AST]:
    """As ast.walk, once a tree, for every rule reads all of it; without what no rule asks for."""
    return [node for node in ast.walk(tree) if not isinstance(node, ast.expr_context | ast.operator | ast.cmpop)]


@pytest.fixture(autouse=True, scope="module")
def no_trees_are_left() -> Iterator[None]:
    """They are nearly two million objects, which each full collection of a later test would look at: two seconds."""
    yield
    parsed.cache_clear()
    walk.cache_clear()


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
    for node in walk(tree):
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


def undependable_imports(files: dict[str, ast.Module]) -> list[str]:
    """Imports of the scheduler by which a plan could depend on something that ranks do not share."""
    return [
        f"{path}:{line} imports {module}"
        for path, tree in files.items()
        if path.startswith("runtime/schedule/")
        for line, module in imports_of(path, tree)
        if module.split(".")[0] in NO_PLAN_DEPENDS_ON
    ]


def counted_multiprocessors(files: dict[str, ast.Module]) -> set[str]:
    """Files of the four layers with an H200's 132 multiprocessors as a number."""
    return {
        path
        for path, tree in files.items()
        if path.split("/")[0] in LAYERS
        and any(isinstance(node, ast.Constant) and node.value == 132 for node in walk(tree))
    }


def first_party_arrows(files: dict[str, ast.Module], annotations: bool = False) -> dict[str, set[str]]:
    """File -> files of the four layers that it imports, itself aside; ``annotations``: under TYPE_CHECKING, too."""
    arrows: dict[str, set[str]] = {}
    for path, tree in files.items():
        if path.split("/")[0] not in LAYERS:
            continue
        skipped = set() if annotations else annotation_lines(tree)
        targets = {file_of(module, files) for line, module in imports_of(path, tree) if line not in skipped}
        arrows[path] = {target for target in targets if target is not None and target != path}
    return arrows


def annotation_lines(tree: ast.Module) -> set[int]:
    """Lines that stand under ``if TYPE_CHECKING``."""
    found: set[int] = set()
    for node in walk(tree):
        if isinstance(node, ast.If) and dotted(node.test).endswith("TYPE_CHECKING"):
            found.update(line for child in node.body for line in range(child.lineno, (child.end_lineno or 0) + 1))
    return found


def file_of(module: str, files: dict[str, ast.Module]) -> str | None:
    """The file of ``a.b.c`` or, where c is a name in it, of ``a.b``; None of what is not ours or is a bare package."""
    parts = module.split(".")
    for length in (len(parts), len(parts) - 1):
        path = "/".join(parts[:length])
        if f"{path}.py" in files:
            return f"{path}.py"
    return None


def circles(arrows: dict[str, set[str]]) -> list[set[str]]:
    """Strongly connected files, more than one each (Tarjan 1972), in the order of their names."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(path: str) -> None:
        number[path] = lowest[path] = len(number)
        stack.append(path)
        for target in sorted(arrows.get(path, ())):
            if target not in number:
                visit(target)
                lowest[path] = min(lowest[path], lowest[target])
            elif target in stack:
                lowest[path] = min(lowest[path], number[target])
        if lowest[path] == number[path]:
            circle = set(stack[stack.index(path) :])
            del stack[stack.index(path) :]
            if len(circle) > 1:
                found.append(circle)

    for path in sorted(arrows):
        if path not in number:
            visit(path)
    return sorted(found, key=min)


def floor_of(path: str) -> int | None:
    """Of a file of the four layers, from the top; None where the table has no place for it."""
    floors = FLOORS[path.split("/")[0]]
    places = {place: floor for floor, places in enumerate(floors) for place in places}
    parts = path.split("/")
    for length in range(len(parts), 1, -1):
        floor = places.get("/".join(parts[:length]))
        if floor is not None:
            return floor
    return None


def homeless_files(files: dict[str, ast.Module]) -> list[str]:
    """Files of the four layers whose place in the house nobody has said."""
    ours = (path for path in files if path.split("/")[0] in LAYERS and path.count("/") and path not in LAYER_FACES)
    return [path for path in ours if floor_of(path) is None]


def upward_arrows(files: dict[str, ast.Module]) -> list[str]:
    """Imports from a lower floor of a layer to a higher one, as ``path -> path``; annotations count."""
    found = []
    for path, targets in first_party_arrows(files, annotations=True).items():
        for target in sorted(targets):
            if target.split("/")[0] != path.split("/")[0] or {path, target} & LAYER_FACES:
                continue
            low, high = floor_of(path), floor_of(target)
            if low is not None and high is not None and high < low:
                found.append(f"{path} -> {target}")
    return found


def circles_of_floors(files: dict[str, ast.Module]) -> list[set[str]]:
    """Folders and loose files of one floor that import each other in a circle."""
    arrows: dict[str, set[str]] = {}
    for path, targets in first_party_arrows(files, annotations=True).items():
        here = place_of(path)
        beside = {place_of(target) for target in targets if target.split("/")[0] == path.split("/")[0]}
        arrows.setdefault(here, set()).update(place for place in beside if place != here)
    return circles(arrows)


def place_of(path: str) -> str:
    """The entry of FLOORS that a file stands under, or the file itself."""
    parts = path.split("/")
    places = {place for floor in FLOORS[parts[0]] for place in floor}
    return next((place for n in range(len(parts), 1, -1) if (place := "/".join(parts[:n])) in places), path)


def reads_the_environment(files: dict[str, ast.Module]) -> list[str]:
    """Where code of the house, launch aside, reads or writes environment variables, as ``path:line what``."""
    found = []
    for path, tree in files.items():
        if path.split("/")[0] not in LAYERS[1:] and path != "lockstride.py":
            continue
        for node in walk(tree):
            if isinstance(node, ast.Attribute) and ENVIRONMENT.fullmatch(dotted(node)):
                found.append(f"{path}:{node.lineno} {dotted(node)}")
        found += [f"{path}:{line} {name}" for line, name in imports_of(path, tree) if ENVIRONMENT.fullmatch(name)]
    return found


def homeless_tests(paths: list[str], folders: set[str]) -> list[str]:
    """Tests below tests/<layer> whose folder is none of the tree's; tests of one file may fill a folder of its name."""
    found = []
    for path in paths:
        parts = path.split("/")
        if parts[0] != "tests" or parts[1] not in MIRRORED or not parts[-1].startswith("test_"):
            continue
        folder = "/".join(parts[:-1])
        if "/".join(parts[1:-1]) not in folders and folder not in ONE_FILE_S_TESTS:
            found.append(path)
    return found


def code_from_data(files: dict[str, ast.Module]) -> list[str]:
    """Everything that could run code found in data, as ``path:line what``."""
    found = []
    for path, tree in files.items():
        found += [f"{path}:{line} {name}" for line, name in imports_of(path, tree) if opens_pickles(name)]
        for node in walk(tree):
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


OF_OTHERS = {"jit/core.py", "jit/cpp_ext.py", "nvfp4_tensor.py", "torch/weights.py"}  # files of other projects


def lost_references(files: dict[str, ast.Module], others: Iterable[str] = ()) -> list[str]:
    """Files that docstrings of the four layers name, and that are not there, as ``path: name``; ``others`` are."""
    paths, lost = {f"/{path}" for path in (*files, *others)}, []
    for path, tree in files.items():
        nodes = walk(tree) if path.split("/")[0] in LAYERS else ()
        for node in nodes:
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                named = re.findall(r"(?<![\w.])(?:\w+/)*[a-z]\w*\.py\b", ast.get_docstring(node) or "")
                lost += [f"{path}: {one}" for one in named if not any(known.endswith(f"/{one}") for known in paths)]
    return [one for one in lost if one.split(": ")[1] not in OF_OTHERS]


def specs_made_elsewhere(files: dict[str, ast.Module]) -> list[str]:
    """Where a LaunchSpec is made that no resolver made, tests aside, as ``path:line``."""
    found = []
    for path, tree in files.items():
        if path.split("/")[0] not in LAYERS or path == SPECS_ARE_MADE_IN:
            continue
        calls = (node for node in walk(tree) if isinstance(node, ast.Call))
        makers = ("LaunchSpec", "LaunchSpec._make")
        found += [f"{path}:{call.lineno}" for call in calls if dotted(call.func).endswith(makers)]
    return found


def lines_of(tree: ast.Module, name: str) -> int:
    """Of the method ``Class.method``, its signature and docstring included; KeyError where there is none."""
    owner, method = name.split(".")
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    methods = {node.name: node for node in classes[owner].body if isinstance(node, ast.FunctionDef)}
    return (methods[method].end_lineno or 0) - methods[method].lineno + 1


def lines_with_machine_paths(text: str) -> list[int]:
    return [text.count("\n", 0, match.start()) + 1 for match in MACHINE_PATH.finditer(text)]


def test_imports_run_one_way() -> None:
    assert uphill_imports(python_files()) == []


def test_no_plan_can_ask_a_clock() -> None:
    assert undependable_imports(python_files()) == []


def test_multiprocessors_are_counted_in_the_traits_alone() -> None:
    assert counted_multiprocessors(python_files()) == COUNTS_MULTIPROCESSORS


def test_no_files_import_each_other_in_a_circle() -> None:
    files = python_files()
    standing = circles(first_party_arrows(files))
    assert standing == CIRCLES_THAT_STAND
    assert circles(first_party_arrows(files, annotations=True)) == standing + CIRCLES_OF_ANNOTATIONS


def test_every_file_has_a_floor() -> None:
    files = python_files()
    assert homeless_files(files) == []
    listed = {place for floors in FLOORS.values() for floor in floors for place in floor}
    assert [place for place in sorted(listed) if not (ROOT / place).exists()] == [], "listed, but not in the tree"


def test_no_arrow_runs_back_up_between_floors() -> None:
    files = python_files()
    assert upward_arrows(files) == []
    assert circles_of_floors(files) == []


def test_only_launch_reads_the_environment() -> None:
    assert reads_the_environment(python_files()) == []


def test_tests_mirror_the_tree() -> None:
    paths = [path for path in tracked() if path.endswith(".py")]
    folders = {str(Path(path).parent) for path in paths if not path.startswith("tests/")}
    assert homeless_tests(paths, folders) == []
    assert all((ROOT / file).is_file() for file in ONE_FILE_S_TESTS.values())


@pytest.mark.slow
def test_nothing_runs_code_found_in_data() -> None:
    assert code_from_data(suspicious_files()) == []


def test_every_file_says_what_it_knows() -> None:
    assert silent_files(python_files()) == []


def test_docstrings_name_files_that_exist() -> None:
    assert lost_references(python_files(), tracked()) == []


def test_a_launch_spec_is_made_by_the_resolver_alone() -> None:
    assert specs_made_elsewhere(python_files()) == []


def test_the_launch_of_a_step_fits_on_a_screen() -> None:
    path, name = LAUNCH_PATH
    assert lines_of(python_files()[path], name) <= A_SCREEN


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


def trees(**sources: str) -> dict[str, ast.Module]:
    """``launch_a="import x"`` as launch/a.py."""
    return {f"{name.replace('_', '/')}.py": ast.parse(source) for name, source in sources.items()}


LATER = "def f():\n    from models.a import A"
NEVER = "if TYPE_CHECKING:\n    from models.a import A"


@pytest.mark.parametrize(
    ("back", "running", "all_of_them"),
    [("from models.a import A", 1, 1), ("import models.a", 1, 1), (LATER, 1, 1), (NEVER, 0, 1), ("import ast", 0, 0)],
)
def test_a_circle_of_files_is_found(back: str, running: int, all_of_them: int) -> None:
    files = trees(models_a="from models import b", models_b="from models.c import C", models_c=back)
    expected = {"models/a.py", "models/b.py", "models/c.py"}
    assert circles(first_party_arrows(files)) == [expected] * running
    assert circles(first_party_arrows(files, annotations=True)) == [expected] * all_of_them


def test_two_circles_are_two() -> None:
    arrows = {"a": {"b", "d"}, "b": {"a"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}, "f": {"f"}}
    assert circles(arrows) == [{"a", "b"}, {"d", "e"}]


@pytest.mark.parametrize(
    ("path", "source", "found"),
    [
        ("runtime/schedule/x.py", "from runtime.execute.executor import Executor", 1),
        ("runtime/execute/step/x.py", "def f():\n    import runtime.engine", 1),
        ("runtime/execute/step/x.py", "from runtime.schedule.plan import StepPlan", 0),
        ("launch/bench/x.py", "from launch.sweep.point import Point", 1),
        ("launch/values.py", "import launch.cli", 1),
        ("models/config.py", "from models.layers.mlp import GatedMLP", 1),
        ("models/config.py", "from models.layers.rope import Rope", 0),
        ("parallel/comm/x.py", "if TYPE_CHECKING:\n    from parallel.layers.shard import ShardContext", 1),
    ],
)
def test_an_arrow_that_runs_back_up_is_found(path: str, source: str, found: int) -> None:
    files = {name: ast.parse("") for name in python_files()}
    assert len(upward_arrows({**files, path: ast.parse(source)})) == found


def test_a_circle_on_one_floor_is_found() -> None:
    files = trees(launch_api_x="import launch.ranks.y", launch_ranks_x="import launch.api.y")
    files |= trees(launch_ranks_y="", launch_api_y="")
    assert upward_arrows(files) == []
    assert circles_of_floors(files) == [{"launch/api", "launch/ranks"}]


def test_a_file_without_a_floor_is_found() -> None:
    assert homeless_files(trees(runtime_x="", runtime_schedule_x="", tests_x="", launch_new_x="")) == [
        "runtime/x.py",
        "launch/new/x.py",
    ]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import os\nos.environ['A']", 1),
        ("import os\nx = os.environ.get('A')", 1),
        ("import os\nos.getenv('A')", 1),
        ("from os import environ", 1),
        ("from os import getenv as g", 1),
        ("import os\nos.path.join('a', environ)", 0),
    ],
)
def test_a_look_into_the_environment_is_found(source: str, found: int) -> None:
    assert bool(reads_the_environment({"models/x.py": ast.parse(source)})) == found
    assert reads_the_environment({"launch/x.py": ast.parse(source)}) == []


def test_a_clock_in_the_scheduler_is_found() -> None:
    source = ast.parse("from time import monotonic\nimport os.path\nfrom itertools import chain")
    found = undependable_imports({"runtime/schedule/x.py": source, "runtime/observe/x.py": source})
    assert found == ["runtime/schedule/x.py:1 imports time.monotonic", "runtime/schedule/x.py:2 imports os.path"]


def test_a_number_of_multiprocessors_is_found() -> None:
    source = ast.parse("WAVES = 2 * 132")
    assert counted_multiprocessors({"models/x.py": source, "tests/x.py": source}) == {"models/x.py"}


def test_a_test_in_no_room_is_found() -> None:
    paths = ["tests/runtime/x/test_a.py", "tests/launch/test_b.py", "tests/gpu/test_c.py", "tests/runtime/x/rig.py"]
    assert homeless_tests(paths, {"launch", "runtime"}) == ["tests/runtime/x/test_a.py"]


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
    assert SUSPICIOUS.search(source)
    assert len(code_from_data({"launch/x.py": ast.parse(source)})) == 1


def test_what_only_looks_like_it_is_fine() -> None:
    source = "model.eval()\njson.load(file)\nsafetensors.torch.load_file(path)\nname = 'pickle'"
    assert code_from_data({"launch/x.py": ast.parse(source)}) == []


def test_a_lost_reference_is_found() -> None:
    files = {"models/x.py": ast.parse('"""Knows: y (y.py), z (models/z.py)."""'), "models/y.py": ast.parse("")}
    assert lost_references(files) == ["models/x.py: models/z.py"]


def test_a_silent_file_is_found() -> None:
    files = {"models/x.py": ast.parse('"""Layers."""'), "models/y.py": ast.parse('"""Knows: shapes."""')}
    assert silent_files(files) == ["models/x.py"]


@pytest.mark.parametrize(
    ("path", "source", "found"),
    [
        ("launch/bench/x.py", "spec = LaunchSpec(plan, kind, role, 8)", 1),
        ("runtime/execute/executor.py", "launch_spec.LaunchSpec(*fields)", 1),
        ("runtime/engine.py", "LaunchSpec._make(fields)", 1),
        ("runtime/engine.py", "spec: LaunchSpec = executor.resolve(plan)", 0),
        ("runtime/execute/launch_spec.py", "LaunchSpec(plan, kind, role, 8)", 0),
        ("tests/gpu/x.py", "LaunchSpec(plan, kind, role, 8)", 0),
    ],
)
def test_a_spec_that_no_resolver_made_is_found(path: str, source: str, found: int) -> None:
    assert len(specs_made_elsewhere({path: ast.parse(source)})) == found


def test_lines_of_a_method_are_counted() -> None:
    source = "class A:\n    def f(self):\n        x = (\n            1\n        )\n\n    def g(self):\n        pass"
    assert [lines_of(ast.parse(source), name) for name in ("A.f", "A.g")] == [4, 2]


def test_a_machine_path_is_found() -> None:
    for folder in ("work", "root", "home"):
        assert lines_with_machine_paths(f"first\ncd /{folder}/somebody\n") == [2]
    assert lines_with_machine_paths("tests/work/x ~/work $HOME/work/x https://site.org/home and /workspace") == []
