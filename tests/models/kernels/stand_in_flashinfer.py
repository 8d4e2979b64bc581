"""A FlashInfer that compiles with shell commands, and a process that builds with it beside itself: ``python -m ...``.

    python -m tests.models.kernels.stand_in_flashinfer FOLDER COMMAND

Knows: the parts of FlashInfer's jit package that models/kernels/attention/flashinfer_build.py asks. Does not know:
what is tested.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

RULES = """ninja_required_version = 1.3
rule compile
  command = echo $in >> compiled && cp $in $out
rule link
  command = {command}
build {folder}/a.o: compile {folder}/a.cu
build {folder}/module.so: link {folder}/a.o
default {folder}/module.so
"""


@dataclass
class Spec:
    """As a JitSpec: ``a.cu`` is compiled to ``a.o``, and ``command`` makes the library of it."""

    folder: Path
    command: str = "cp $in $out"
    is_aot: bool = False
    name = "module"
    sources = extra_cflags = extra_cuda_cflags = extra_ldflags = extra_include_dirs = ()
    needs_device_linking = False

    @property
    def build_dir(self) -> Path:
        return self.folder

    @property
    def ninja_path(self) -> Path:
        return self.folder / "build.ninja"

    @property
    def lock_path(self) -> Path:
        return self.folder / "module.lock"

    @property
    def library(self) -> Path:
        return self.folder / "module.so"

    @property
    def is_compiled(self) -> bool:
        return self.library.exists()

    @property
    def ninja_file(self) -> str:
        return RULES.format(folder=self.folder, command=self.command)


def modules(spec: Spec | None) -> dict[str, ModuleType]:
    """What sys.modules needs for ``import flashinfer.jit``; every module asked for is ``spec``."""
    flashinfer, jit = ModuleType("flashinfer"), ModuleType("flashinfer.jit")
    cpp_ext = SimpleNamespace(generate_ninja_build_for_op=lambda **_: "" if spec is None else spec.ninja_file)
    jit.__dict__.update(cpp_ext=cpp_ext, gen_batch_prefill_module=lambda *_: spec)
    return {"flashinfer": flashinfer, "flashinfer.jit": jit}


def main() -> None:
    spec = Spec(Path(sys.argv[1]), sys.argv[2])
    sys.modules.update(modules(spec))
    from models.kernels.attention import flashinfer_build

    flashinfer_build.build_in_background(spec)
    print("begun", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main()
