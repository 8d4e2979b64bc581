"""FlashInfer's compiled prefill module: whether it is in the cache on disk, and building it in the background.

Knows: how FlashInfer 0.6.13 caches what it compiles (its jit/core.py): a ninja file, a lock and a library a module.
Does not know: what the module computes (flashinfer_prefill.py), who asks for it (prefill_choice.py).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from flashinfer.jit import cpp_ext, gen_batch_prefill_module

from models.kernels.interface import FlashInferSwitches

_BUILDER = Path(__file__).with_name("flashinfer_build_process.py")
_NOTHING_TO_DO = "no work to do"  # ninja's message
_PLAIN = (0, False, False, False)  # no position encoding, window, soft cap or fp16 accumulation
_started: list[subprocess.Popen[bytes]] = []  # kept: Python warns about running processes without a reference


def arguments(backend: str, dtype: torch.dtype, head_dim: int) -> tuple[Any, ...]:
    """The arguments by which FlashInfer's wrapper looks up a module; they must be exactly the same."""
    return (backend, dtype, dtype, dtype, torch.int32, head_dim, head_dim, *_PLAIN)


def spec_of(backend: str, dtype: torch.dtype, head_dim: int) -> Any:
    """The JitSpec of a prefill module; writes its sources into FlashInfer's cache. Raises any error of FlashInfer's."""
    return gen_batch_prefill_module(*arguments(backend, dtype, head_dim))


def is_built(spec: Any) -> bool:
    """Whether FlashInfer would load the module without compiling anything. Takes no lock and writes nothing.

    The library alone proves little: it may be half written, or of other flags or headers. So the ninja file must be the
    one that would be written now, and ninja must find nothing to do.
    """
    if spec.is_aot:
        return True
    if not spec.is_compiled or not spec.ninja_path.exists() or spec.ninja_path.read_text() != _ninja_file(spec):
        return False
    command = ["ninja", "-n", "-C", str(spec.build_dir.resolve()), "-f", str(spec.ninja_path.resolve())]
    dry_run = subprocess.run(command, capture_output=True, text=True, check=False)
    return dry_run.returncode == 0 and _NOTHING_TO_DO in dry_run.stdout


def obstacle(switches: FlashInferSwitches) -> str | None:
    """Why nothing can be compiled here; None where it can."""
    if not switches.compiles:
        return "FLASHINFER_DISABLE_JIT is set"
    if shutil.which("ninja") is None:
        return "there is no ninja in PATH: pip install ninja"
    try:
        compiler = Path(switches.nvcc or Path(cpp_ext.get_cuda_path(), "bin", "nvcc"))
    except RuntimeError as missing:
        return f"{missing}: set CUDA_HOME"
    return None if compiler.exists() else f"there is no {compiler}: set CUDA_HOME, or FLASHINFER_NVCC"


def build_in_background(spec: Any) -> Path:
    """Starts a build at the lowest priority in a process that ends with this one; returns its log file.

    Finished objects survive an interruption. Does nothing where another process builds the same. Call it from a thread
    that lives as long as the process: Linux signals the death of the parent thread, not of the process.
    """
    spec.build_dir.mkdir(parents=True, exist_ok=True)
    log = Path(spec.build_dir, "build-aside.log")
    wanted = Path(spec.build_dir, f"build-aside.{os.getpid()}.ninja")
    wanted.write_text(_ninja_file(spec))
    paths = (spec.lock_path, spec.build_dir, wanted, spec.ninja_path)
    with log.open("ab") as said:
        builder = subprocess.Popen(
            [sys.executable, "-I", str(_BUILDER), str(os.getpid()), *(str(path.resolve()) for path in paths)],
            stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    _started.append(builder)
    return log


def _ninja_file(spec: Any) -> str:
    """The text that spec.write_ninja() would write."""
    text: str = cpp_ext.generate_ninja_build_for_op(
        name=spec.name,
        sources=spec.sources,
        extra_cflags=spec.extra_cflags,
        extra_cuda_cflags=spec.extra_cuda_cflags,
        extra_ldflags=spec.extra_ldflags,
        extra_include_dirs=spec.extra_include_dirs,
        needs_device_linking=spec.needs_device_linking,
    )
    return text
