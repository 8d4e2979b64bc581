"""Two kernels of a test, compiled ahead of their launches by a driver without a GPU; prints what came of it, as JSON.

Knows: what shall happen once only. Does not know: what is expected (test_compile_ahead.py). For a process of its own:
Triton's driver is changed for good.
"""

from __future__ import annotations

import errno
import json
import threading
from contextlib import suppress
from typing import Any, NoReturn

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import _async_compile, build

from models.kernels import compile_ahead as ahead
from tests.models.kernels.compiling_driver import CompilingDriver


@triton.jit  # type: ignore[untyped-decorator]
def add(x_ptr: tl.tensor, size: int, MORE: tl.constexpr) -> None:
    places = tl.arange(0, 64)
    tl.store(x_ptr + places, tl.load(x_ptr + places) + MORE, mask=places < size)


@triton.jit  # type: ignore[untyped-decorator]
def broken(x_ptr: tl.tensor) -> None:
    tl.store(x_ptr + tl.arange(0, 48), 1)  # no power of two


def main() -> None:
    driver = CompilingDriver().activate()
    x = torch.empty(64, dtype=torch.int32, device="meta")
    values: list[float] = []

    def work() -> None:
        for more in (1, 2, 1, 2, 3):
            add[(1,)](x, 64, MORE=more)
        for size in (4, 64):  # the one is no multiple of 16: another kernel
            add[(1,)](x, size, MORE=4)
        broken[(1,)](x)
        torch.full((1000,), 7)  # likely the memory that comes next
        drawn = torch.empty(1000, dtype=torch.int64)
        index = drawn.new_empty(3), torch.empty_like(drawn), torch.empty_strided((2, 2), (2, 1), dtype=torch.int64)
        values.extend(part.sum().item() for part in (drawn, *index))

    def fails() -> None:
        add[(1,)](x, 64, MORE=5)
        raise ZeroDivisionError("of the work")

    def interrupted(futures: object) -> NoReturn:
        raise KeyboardInterrupt

    def many() -> None:
        for more in range(10, 17):
            add[(1,)](x, 64, MORE=more)

    bound: list[bool] = []
    loads = build._load_module_from_path
    told: list[tuple[int, int]] = []
    ready = ahead.compile_ahead(
        [work, work],
        threads=3,
        bind_thread=lambda: bound.append(build._load_module_from_path is not loads),
        progress=lambda done, total: told.append((done, total)),
    )
    found: dict[str, Any] = {"ready": ready, "told": told}
    found |= {"launched": len(driver.found), "values": values, "threads": threading.active_count(), "bound": len(bound)}
    found |= {"apart": bound, "apart later": build._load_module_from_path is not loads}
    asked = len(driver.asked)
    try:
        work()
    except triton.compiler.errors.CompilationError as error:
        found["broken"] = "arange" in str(error)
    found |= {"asked": asked, "asked later": len(driver.asked) - asked, "launched later": len(driver.found)}
    try:
        ahead.compile_ahead([fails], threads=1)
    except ZeroDivisionError as error:
        found["raised"] = str(error)
    add[(1,)](x, 64, MORE=5)  # launches are launches again, and nothing is left of what was only noted
    found["launched last"] = len(driver.found)
    with pytest.MonkeyPatch.context() as patched, suppress(KeyboardInterrupt):
        patched.setattr(_async_compile, "as_completed", interrupted)  # while leaving the mode waits
        ahead.compile_ahead([fails], threads=1)
    found["mode left"] = _async_compile.active_mode.get() is None
    _async_compile.active_mode.set(None)
    backend: Any = CUDABackend
    assemble, failed = backend.make_cubin, False

    def assemble_at_second_try(*arguments: Any, **options: Any) -> Any:
        nonlocal failed
        if not failed:
            failed = True
            raise OSError(errno.ENOSPC, "No space left on device")
        return assemble(*arguments, **options)

    backend.make_cubin = assemble_at_second_try
    ahead.compile_ahead([lambda: add[(1,)](x, 64, MORE=6)], threads=1)
    with suppress(OSError):
        add[(1,)](x, 64, MORE=6)
    found |= {"failed once": failed, "launched after a failure": len(driver.found)}
    compiled: list[int] = []
    knobs.compilation.listener = lambda *, src, **rest: compiled.append(max(src.constants.values()))
    ahead.compile_ahead([many], threads=1, local_rank=1, local_world=3)
    found["compiled"] = [*compiled]
    module: Any = ahead
    module._load_module, alone = None, list[int]()
    ahead.compile_ahead([lambda: add[(1,)](x, 64, MORE=7)], threads=3, bind_thread=lambda: alone.append(1))
    found["threads without"] = len(alone)
    module.AsyncCompileMode = object
    found["without the mode"] = ahead.compile_ahead([fails], threads=1)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
