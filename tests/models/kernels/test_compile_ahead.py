"""Kernels compiled side by side before the work that launches them: what is compiled, what runs, what is left undone.

Knows: what ahead_of_launches.py prints. Does not know: any kernel of a step.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from models.kernels.compile_ahead import launchers_apart
from tests.torchrun import python


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cache = str(tmp_path_factory.mktemp("triton"))
    ran = python("tests.models.kernels.ahead_of_launches", TRITON_CACHE_DIR=cache)
    told: dict[str, Any] = json.loads(ran.output.splitlines()[-1])
    return told


def test_every_kernel_is_compiled_once_and_none_is_launched(found: dict[str, Any]) -> None:
    assert found["ready"] == found["asked"] == 6  # five forms of one, and the broken one
    assert found["launched"] == 0
    assert found["bound"] == 3
    assert found["told"] == [[ready, 6] for ready in range(1, 7)]


def test_memory_that_no_kernel_filled_is_zero(found: dict[str, Any]) -> None:
    assert found["values"][:4] == [0, 0, 0, 0]


def test_later_launches_compile_nothing(found: dict[str, Any]) -> None:
    assert found["asked later"] == 0
    assert found["launched later"] == 5


def test_a_kernel_that_cannot_be_compiled_is_left_to_its_launch(found: dict[str, Any]) -> None:
    assert found["broken"]


def test_a_compilation_that_failed_once_is_tried_again_by_the_launch(found: dict[str, Any]) -> None:
    assert found["failed once"]
    assert found["launched after a failure"] == 7


def test_a_failure_of_the_work_is_raised_and_launches_are_launches_again(found: dict[str, Any]) -> None:
    assert found["raised"] == "of the work"
    assert found["launched last"] == 6


def test_an_interrupt_while_the_mode_is_left_leaves_it_all_the_same(found: dict[str, Any]) -> None:
    assert found["mode left"]


def test_ranks_of_a_node_begin_with_kernels_of_their_own(found: dict[str, Any]) -> None:
    """The second of three: then those that the third began with, and those of the first."""
    assert found["compiled"] == [11, 14, 12, 15, 10, 13, 16]


def test_launchers_are_kept_apart_while_threads_compile(found: dict[str, Any]) -> None:
    assert found["apart"] == [True] * 3
    assert not found["apart later"]


def test_where_launchers_cannot_be_kept_apart_one_thread_compiles(found: dict[str, Any]) -> None:
    assert found["threads without"] == 1


def test_without_tritons_mode_nothing_is_run(found: dict[str, Any]) -> None:
    assert found["without the mode"] == 0


NAME = "lockstride_test_launcher"
LAUNCHER = """
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *given) {{ return PyLong_FromLong({number}); }}
static PyMethodDef methods[] = {{{{"launch", launch, METH_VARARGS, ""}}, {{NULL, NULL, 0, NULL}}}};
static struct PyModuleDef definition = {{PyModuleDef_HEAD_INIT, "{name}", NULL, -1, methods}};
PyMODINIT_FUNC PyInit_{name}(void) {{ return PyModule_Create(&definition); }}
"""


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes the module of a number as Triton makes a launcher, or loads it again."""
    build = pytest.importorskip("triton.runtime.build")
    if not any(map(shutil.which, ("gcc", "clang"))):
        pytest.skip("Triton needs a C compiler")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def of(number: int) -> ModuleType:
        loaded: ModuleType = build.compile_module_from_src(LAUNCHER.format(number=number, name=NAME), NAME)
        return loaded

    yield of
    sys.modules.pop(NAME, None)


def test_a_launcher_is_its_own_whatever_is_loaded_beside_it(launcher: Any) -> None:
    with launchers_apart():
        one, two = launcher(1), launcher(2)
        again = launcher(1)
        assert (one.launch(), two.launch(), again.launch()) == (1, 2, 1)


def test_python_shares_modules_of_one_name(launcher: Any) -> None:
    """Which is why they are kept apart. Where this fails, it no longer has to be."""
    launcher(1)
    two = launcher(2)
    launcher(1)
    assert two.launch() == 1
