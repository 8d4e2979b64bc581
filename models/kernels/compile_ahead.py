"""Compiles the Triton kernels that work will launch, side by side, before the work is run for good.

Knows: how to have Triton compile a launch without launching it, and what such a run leaves undone.
Does not know: which work there is (runtime/execute/executor.py), or what any kernel does.

A first start on a machine compiles a hundred kernels and more, and Triton compiles each where it is first launched,
while everything waits. Here work runs once with every launch left out: only what it would have launched is noted, and
threads compile that after it. Most of a compilation is in LLVM and in child processes, without Python's lock.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

try:
    from triton import AsyncCompileMode
    from triton.runtime.jit import JITFunction
except ImportError:  # no Triton, or an older one: kernels are compiled one after the other
    AsyncCompileMode = object
try:  # private to Triton, so it may move: kernels are compiled ahead without it, too
    from triton.runtime._async_compile import active_mode
except ImportError:
    active_mode = None
try:  # private, too: without it one thread compiles
    from triton.runtime import build as triton_build

    _load_module: Callable[[str, str], ModuleType] | None = triton_build._load_module_from_path
except (ImportError, AttributeError):
    _load_module = None

log = logging.getLogger(__name__)

MOST_THREADS = 16  # tracing a kernel, a seventh of its compilation, holds Python's lock


def threads_here() -> int:
    """Of this process, so that those of the node's other GPUs have their cores, too."""
    return max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // max(1, torch.cuda.device_count())))


def compile_ahead(
    works: Iterable[Callable[[], object]], *, threads: int, local_rank: int = 0, local_world: int = 1,
    bind_thread: Callable[[], object] = lambda: None, progress: Callable[[int, int], None] | None = None,
) -> int:  # fmt: skip
    """Run each of ``works`` without its Triton kernels, and have all of these ready to be launched; says how many.

    Torch's own operations run, over memory that no kernel has filled: what is allocated meanwhile is zeroed, so that an
    index is one that exists. Results mean nothing. The ``local_world`` ranks of a node do the same now: each begins
    with its share of kernels, and loads from Triton's cache what the others have compiled meanwhile. ``bind_thread`` is
    called in each of the ``threads`` first, ``progress`` with the kernels that are ready and all of them. A kernel that
    cannot be compiled is left to its launch, which raises. 0 where Triton cannot compile aside.
    """
    if AsyncCompileMode is object:
        return 0
    began = time.perf_counter()
    noted = _Noted()
    with _Ahead(noted, ignore_errors=True) as ahead:
        try:
            with _launching_nothing(), _Zeroed():
                for work in works:
                    work()
            between = time.perf_counter()
            noted.share(local_rank, local_world)
            with launchers_apart():
                noted.compile(1 if _load_module is None else threads, bind_thread, progress)
            ahead.forget_failures()
        except BaseException:
            ahead.abandon()
            raise
    found, took = len(noted.kernels), (between - began, time.perf_counter() - between)
    log.info("kernels: %d found in %.1f s, compiled or loaded in %.1f s by %d threads", found, *took, threads)
    return found


class _Ahead(AsyncCompileMode):  # type: ignore[misc]
    """Triton's own mode: each launch submits what would compile its kernel, once a kernel."""

    def __init__(self, noted: _Noted, *, ignore_errors: bool) -> None:
        super().__init__(noted, ignore_errors=ignore_errors)
        self._noted = noted
        self._puts: list[tuple[Any, Callable[[Any], None]]] = []  # into a kernel's cache of what is compiled

    def __exit__(self, *raised: Any) -> None:
        try:
            super().__exit__(*raised)  # waits for every future: Ctrl-C there would leave the mode set for good
        finally:
            if active_mode is not None:
                active_mode.set(None)

    def submit(self, key: str, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]) -> Any:
        future = super().submit(key, compile_fn, finalize_fn)
        finalize_fn(future)  # the next launch of the same finds it, instead of working out its key again
        self._puts.append((future, finalize_fn))
        return future

    def forget_failures(self) -> None:
        """Their launches compile again, alone: what one lacked, memory or room on a disk, may be there by then."""
        for kernel, put in self._puts:
            if kernel.future.exception() is not None:
                put(None)

    def abandon(self) -> None:
        """What is not compiled yet shall be as if it had not been asked for; leaving the mode waits for the others."""
        for _, put in self._puts:
            put(None)
        for future, _ in self._noted.kernels:
            if not future.done():
                future.set_exception(CancelledError())


class _Noted(Executor):
    """Runs nothing by itself: during work, threads that compile would take Python's lock from it again and again."""

    def __init__(self) -> None:
        self.kernels: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.kernels.append((future, partial(fn, *args, **kwargs)))
        return future

    def share(self, local_rank: int, local_world: int) -> None:
        """This rank's kernels first, every ``local_world``-th; then those of the others, which Triton's cache has by
        then. No rank waits for another, and a kernel that two compile at once is right twice.
        """
        ranks = [*range(local_rank, local_world), *range(local_rank)]
        self.kernels = [kernel for rank in ranks for kernel in self.kernels[rank::local_world]]

    def compile(
        self, threads: int, bind_thread: Callable[[], object], progress: Callable[[int, int], None] | None
    ) -> None:
        pool = ThreadPoolExecutor(threads, "compile", initializer=bind_thread)
        try:
            for ready, _ in enumerate(pool.map(_compile, self.kernels), 1):
                if progress is not None:
                    progress(ready, len(self.kernels))
        finally:
            pool.shutdown(cancel_futures=True)  # Ctrl-C waits for those at work, not for all


def _compile(noted: tuple[Future[Any], Callable[[], Any]]) -> None:
    future, compiled = noted
    try:
        kernel = compiled()
        kernel.run  # noqa: B018 - a property: it makes the launcher, C code a signature, and loads the machine code
        future.set_result(kernel)
    except Exception as error:
        future.set_exception(error)


@contextmanager
def launchers_apart() -> Iterator[None]:
    """Inside, a module that one thread has Triton load stays as it is while others load theirs.

    All launchers are extension modules of one name, and Python keeps one module a name: load the file of an earlier one
    again, as kernels of one signature do, and its ``launch`` is put into the module that was loaded last. Where another
    thread had not taken its own from there, its kernel would be launched with another one's arguments.
    """
    load = _load_module
    if load is None:
        yield
        return
    one_at_a_time = threading.Lock()

    def load_apart(name: str, path: str) -> ModuleType:
        own = ModuleType(name)
        with one_at_a_time:
            own.__dict__.update(vars(load(name, path)))
        return own

    triton_build._load_module_from_path = load_apart
    try:
        yield
    finally:
        triton_build._load_module_from_path = load


@contextmanager
def _launching_nothing() -> Iterator[None]:
    """Inside, each launch of this thread compiles at most, as JITFunction.warmup does, whatever was compiled before."""
    launch, thread = JITFunction.run, threading.get_ident()

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        warmup = warmup or threading.get_ident() == thread
        return launch(self, *args, grid=grid, warmup=warmup, **options)

    JITFunction.run = compile_only
    try:
        yield
    finally:
        JITFunction.run = launch


class _Zeroed(TorchFunctionMode):
    """Tensors that would be empty are zeros. (A TorchDispatchMode imports torch._dynamo: 3 s.)"""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        return out.zero_() if func in _EMPTY else out


_EMPTY = frozenset(
    (torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty, torch.Tensor.new_empty_strided)
)
