"""Triton without a GPU: a driver that lets Triton compile for an H200, and keeps what ptxas made instead of running it.

Knows: Triton's driver interface, how a cubin tells its registers, and NVIDIA's rules of occupancy for sm_90.
Does not know: any kernel, who launches it (compiled_kernels.py), or in what order it may run (launch_order.py).

A launch goes through Triton's own path up to the last call, so types, constants, divisibility hints and launch options
are those that a real launch with the same arguments would have. Tensors may lie on torch's meta device.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from tests.models.kernels.launch_order import LaunchOrder, launch_order

MULTIPROCESSORS = 132
CAPABILITY = (9, 0)
REGISTERS = 65536  # of a multiprocessor
MOST_SHARED = 232448  # bytes that one program may ask for
SHARED = 233472  # bytes of a multiprocessor, 1 KiB of which every program takes for the system
_WARPS, _PROGRAMS, _PARTITIONS = 64, 32, 4  # of a multiprocessor


@dataclass(frozen=True, slots=True)
class Compiled:
    """One compiled kernel. ``where``: the first launch that needed it. ``element``: Triton's type of the first pointer.

    ``constants``: its constexprs. ``spills``: 32-bit words a thread keeps in memory for want of registers, as Triton
    counts them. ``shared``: bytes a program. ``stores``: to global memory in PTX, by form, ``v4.b32`` for 16 bytes.
    ``order``: what it does before it waits; None where it is launched alone. ``lost``: see ``lost_carries``.
    """

    kernel: str
    where: str
    element: str
    constants: dict[str, Any]
    grid: tuple[int, int, int]
    warps: int
    registers: int
    spills: int
    shared: int
    stores: dict[str, int]
    order: LaunchOrder | None
    lost: int

    @property
    def programs(self) -> int:
        """Programs that a multiprocessor holds at once."""
        return programs_at_once(self.warps, self.registers, self.shared)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"programs": self.programs}


def programs_at_once(warps: int, registers: int, shared: int) -> int:
    """How many programs of ``warps`` warps, ``registers`` a thread and ``shared`` bytes one multiprocessor holds.

    Registers are given out to a warp in units of 256, shared memory to a program in units of 128 bytes; 0 where not
    even one program fits.
    """
    if shared > MOST_SHARED or _up(registers * 32, 256) * _up(warps, _PARTITIONS) > REGISTERS:
        return 0
    warps_by_registers = REGISTERS // _PARTITIONS // _up(max(registers, 1) * 32, 256) * _PARTITIONS
    by_shared = SHARED // _up(shared + 1024, 128)
    return min(_PROGRAMS, _WARPS // warps, warps_by_registers // warps, by_shared)


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


class CompilingDriver:
    """Triton's active driver once ``activate``d. ``found``: every kernel that was launched, once, in order.

    ``where`` is written into what is found. ``capability``: of the GPU to compile for. Nothing is refused for its
    shared memory: that is for the reader to judge.
    Machine code is read once a kernel and set of its switches, for disassembling takes as long as compiling.
    Without ``compile`` nothing is compiled: ``asked`` has what would be, by kernel and Triton's key of it. ``only``:
    those that are, if it is set, and so is ``package``: only its kernels; with ``codes`` those with 8-bit arguments.
    """

    def __init__(self, *, compile: bool = True, only: Collection[tuple[str, str]] | None = None) -> None:
        self.where = ""
        self.package = ""
        self.codes = False
        self.capability = CAPABILITY
        self.found: dict[str, Compiled] = {}
        self.asked: dict[tuple[str, str], str] = {}
        self._compile = compile
        self._only = only
        self._demands: dict[tuple[str, bool, *tuple[str, ...]], dict[tuple[str, str], tuple[bool, int]]] = {}
        self.utils = SimpleNamespace(get_device_properties=_properties, load_binary=_not_loaded)
        self._disassembled: set[tuple[object, ...]] = set()
        self._files: dict[str, dict[str, Path]] = {}  # of each compiled kernel: by suffix

    def activate(self) -> CompilingDriver:
        driver.set_active(self)
        knobs.compilation.listener = self._listen
        knobs.runtime.jit_cache_hook = self._ask
        return self

    def get_current_target(self) -> GPUTarget:
        major, minor = self.capability
        return GPUTarget("cuda", 10 * major + minor, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        """Called once a compiled kernel, when it is first launched; what it returns is called at every launch."""

        def launch(x: int, y: int, z: int, *rest: object) -> None:
            if metadata.hash not in self.found:
                self.found[metadata.hash] = self._compiled(source, metadata, (x, y, z))

        return launch

    def most_demanding(self) -> set[tuple[str, str]]:
        """Of what was asked, one of each kernel and 8-bit types of its arguments, by TMA and by pointers: with
        bfloat16, where there is one, and the largest tiles and loops (product of its whole-number constants)."""
        return {max(keys, key=lambda key: (keys[key], key)) for keys in self._demands.values()}

    def _ask(self, *, key: object, fn: Any, compile: Any, **rest: object) -> bool:
        """Before a compilation; True keeps Triton from it, and from the launch."""
        asked = fn.name, str(key)
        self.asked.setdefault(asked, self.where)
        types = str(compile["signature"])
        codes = sorted(set(re.findall(r"(?:\*|tensordesc<)k?(fp8\w+|[iu]8\b)", types)))
        if not fn.module.startswith(self.package) or (self.codes and not codes):
            return True
        numbers = (value for value in compile["constants"].values() if type(value) is int and value > 0)
        alike = self._demands.setdefault((fn.name, "tensordesc" in types, *codes), {})
        alike[asked] = "bf16" in types, math.prod(numbers)
        return not self._compile or (self._only is not None and asked not in self._only)

    def _listen(self, *, metadata: dict[str, Any], metadata_group: dict[str, str], **rest: object) -> None:
        self._files[metadata["hash"]] = {Path(path).suffix: Path(path) for path in metadata_group.values()}

    def _compiled(self, source: Any, metadata: Any, grid: tuple[int, int, int]) -> Compiled:
        files, names = self._files[metadata.hash], source.fn.arg_names
        told = _tool(knobs.nvidia.cuobjdump, "--dump-resource-usage", files[".cubin"])
        words = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", told)}
        spilled = words["STACK"] + words["LOCAL"]
        if spilled and not re.search(r"\b(LDL|STL)\b", _tool(knobs.nvidia.nvdisasm, "-c", files[".cubin"])):
            spilled = 0  # LLVM asked for a byte of stack that no instruction touches
        params = source.fn.params  # an argument that happens to be 1 is a constant too, but none of ours
        constants = {
            names[number]: value for (number,), value in source.constants.items() if params[number].is_constexpr
        }
        ptx = files[".ptx"].read_text()
        order = None
        if metadata.launch_pdl:
            switches = (source.fn.__name__, *(value for value in constants.values() if isinstance(value, bool)))
            sass = None
            if switches not in self._disassembled:
                self._disassembled.add(switches)
                sass = _machine_code(files[".cubin"])
            order = launch_order(ptx, sass, _arguments(source.signature))
        return Compiled(
            kernel=source.fn.__name__,
            where=self.where,
            element=next(kind[1:] for kind in source.signature.values() if kind.startswith("*")),
            constants=constants,
            grid=grid,
            warps=metadata.num_warps,
            registers=words["REG"],
            spills=spilled // 4,
            shared=metadata.shared,
            stores=dict(Counter(re.findall(r"\bst\.global\.([\w.:]+)", ptx))),
            order=order,
            lost=lost_carries(files[".ttir"].read_text(), files[".ttgir"].read_text()),
        )


def lost_carries(before: str, after: str) -> int:
    """Of loops with a loop within: how many values fewer are carried in the code ``after`` Triton's passes for GPUs.

    Triton 3.6 takes a value for unused where only the bounds of the loop within depend on it, and gives every round the
    first round's (https://github.com/triton-lang/triton/pull/9036). A loop that is gone has lost all.
    """
    return sum(max(0, had - has) for had, has in zip_longest(_carried(before), _carried(after), fillvalue=0))


def _carried(code: str) -> list[int]:
    """Values that each loop with a loop within carries, in order."""
    loops: list[tuple[int, int, list[bool]]] = []  # depth of its body, values, whether there is a loop within
    found: list[tuple[int, list[bool]]] = []
    depth = 0
    for line in code.splitlines():
        line = line.partition(" loc(")[0]
        if "scf.for " in line:
            for _, _, within in loops:
                within.append(True)
            carried = re.search(r"iter_args\((.*?)\) ->", line)
            loop = depth + 1, carried[1].count(" = ") if carried else 0, list[bool]()
            loops.append(loop)
            found.append(loop[1:])
        depth += line.count("{") - line.count("}")
        while loops and depth < loops[-1][0]:
            loops.pop()
    return [values for values, within in found if within]


def _arguments(signature: dict[str, Any]) -> list[str]:
    """Names of a kernel's arguments in PTX: a descriptor of n dimensions is followed by n sizes and n strides, and a
    tuple is as many arguments as it has members.
    """
    names: list[str] = []
    for name, kind in signature.items():
        if isinstance(kind, tuple):
            names += _arguments({f"{name}[{number}]": one for number, one in enumerate(kind)})
        elif kind != "constexpr":
            sizes_and_strides = 2 * (kind.count(",") + 1) if kind.startswith("tensordesc") else 0
            names += [name, *[f"{name}'s"] * sizes_and_strides]
    return names


def _machine_code(cubin: Path) -> str:
    """Of a compiled kernel, as text, which is kept beside it: Triton's cache has a folder for each."""
    kept = cubin.with_suffix(".sass")
    if not kept.exists():
        whole = kept.with_suffix(f".{os.getpid()}")  # nobody reads a half
        whole.write_text(_tool(knobs.nvidia.nvdisasm, "-c", "-ndf", cubin))
        whole.replace(kept)
    return kept.read_text()


def _tool(tool: Any, *arguments: object) -> str:
    """What one of the CUDA tools in Triton's wheel prints."""
    return subprocess.run([tool.path, *map(str, arguments)], stdout=subprocess.PIPE, check=True, text=True).stdout


def _properties(device: int) -> dict[str, int]:
    """``max_shared_mem`` is the most that can be said, so that Triton refuses nothing."""
    return {
        "max_shared_mem": 2**31 - 1,
        "max_num_regs": REGISTERS,
        "multiprocessor_count": MULTIPROCESSORS,
        "warpSize": 32,
    }


def _not_loaded(name: str, cubin: bytes, shared: int, device: int) -> tuple[object, object, int, int, int]:
    """(module, function, registers, spills, most threads): the last is asked for, the others only kept."""
    return object(), object(), 0, 0, 1024
