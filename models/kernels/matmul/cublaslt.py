"""x @ W^T by a chosen algorithm of cuBLASLt: its heuristic returns several, and the first is not always the fastest.

Knows: the few cuBLASLt calls that one row-major product needs (through ctypes; torch has loaded the library).
Does not know: which algorithm is fastest (choice_table.py).
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p

import torch
from torch import Tensor

# Values of cublasLt.h and library_types.h.
_COMPUTE_32F = 68
_REAL_32F = 0
_TYPES = {torch.bfloat16: 14, torch.float16: 2}
_DESC_TRANSA = 3
_OP_T = 1
_PREFERENCE_MAX_WORKSPACE = 1
_SONAMES = ("libcublasLt.so.13", "libcublasLt.so.12")


class _Algorithm(ctypes.Structure):
    _fields_ = (("data", c_uint64 * 8),)


class _Heuristic(ctypes.Structure):
    _fields_ = (
        ("algorithm", _Algorithm),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class CublasLtError(RuntimeError):
    """A cuBLASLt call returned an error status."""


class Linear:
    """Matrix products on one device, one stream at a time.

    Raises OSError where the library cannot be loaded, CublasLtError where it cannot be initialised.
    """

    def __init__(self, device: torch.device, workspace_bytes: int = 64 << 20) -> None:
        self._library = _load()
        self._workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=device)
        self._handle = c_void_p()
        self._call("cublasLtCreate", byref(self._handle))
        self._library.cublasLtGetVersion.restype = c_size_t
        self.version = int(self._library.cublasLtGetVersion())
        self._problems: dict[tuple[int, int, int, torch.dtype], _Problem] = {}

    def algorithms(self, rows: int, outputs: int, inner: int, dtype: torch.dtype, most: int = 16) -> list[str]:
        """The algorithms that the heuristic returns for this shape, best guess first, as hexadecimal bytes."""
        problem = self._problem(rows, outputs, inner, dtype)
        preference = c_void_p()
        self._call("cublasLtMatmulPreferenceCreate", byref(preference))
        limit = c_size_t(self._workspace.numel())
        self._call(
            "cublasLtMatmulPreferenceSetAttribute", preference, _PREFERENCE_MAX_WORKSPACE, byref(limit), c_size_t(8)
        )
        found, count = (_Heuristic * most)(), c_int()
        self._call(
            "cublasLtMatmulAlgoGetHeuristic", self._handle, problem.operation, problem.weight, problem.inputs,
            problem.outputs, problem.outputs, preference, most, found, byref(count),
        )  # fmt: skip
        self._library.cublasLtMatmulPreferenceDestroy(preference)
        return [bytes(found[i].algorithm).hex() for i in range(count.value) if found[i].state == 0]

    def can_run(self, rows: int, outputs: int, inner: int, dtype: torch.dtype, algorithm: str) -> bool:
        """Whether the library can run ``algorithm``, found for other rows, on this shape and in our workspace."""
        problem, checked = self._problem(rows, outputs, inner, dtype), _Heuristic()
        status = self._library.cublasLtMatmulAlgoCheck(
            self._handle, problem.operation, problem.weight, problem.inputs, problem.outputs, problem.outputs,
            byref(_Algorithm.from_buffer_copy(bytes.fromhex(algorithm))), byref(checked),
        )  # fmt: skip
        return bool(status == 0) and checked.state == 0 and checked.workspace <= self._workspace.numel()

    def run(self, x_MK: Tensor, weight_OK: Tensor, algorithm: str, out_MO: Tensor | None = None) -> Tensor:
        """x @ W^T, [M, O], by one of ``algorithms``; into ``out_MO``, contiguous, if given."""
        rows, inner = x_MK.shape
        problem = self._problem(rows, weight_OK.shape[0], inner, x_MK.dtype)
        if out_MO is None:
            out_MO = torch.empty(rows, weight_OK.shape[0], dtype=x_MK.dtype, device=x_MK.device)
        one, zero = c_float(1.0), c_float(0.0)
        out = c_void_p(out_MO.data_ptr())
        self._call(
            "cublasLtMatmul", self._handle, problem.operation, byref(one), c_void_p(weight_OK.data_ptr()),
            problem.weight, c_void_p(x_MK.data_ptr()), problem.inputs, byref(zero), out, problem.outputs, out,
            problem.outputs, byref(_Algorithm.from_buffer_copy(bytes.fromhex(algorithm))),
            c_void_p(self._workspace.data_ptr()), c_size_t(self._workspace.numel()),
            c_void_p(torch.cuda.current_stream(x_MK.device).cuda_stream),
        )  # fmt: skip
        return out_MO

    def _problem(self, rows: int, outputs: int, inner: int, dtype: torch.dtype) -> _Problem:
        key = (rows, outputs, inner, dtype)
        if key not in self._problems:
            operation = c_void_p()
            self._call("cublasLtMatmulDescCreate", byref(operation), _COMPUTE_32F, _REAL_32F)
            self._call("cublasLtMatmulDescSetAttribute", operation, _DESC_TRANSA, byref(c_int(_OP_T)), c_size_t(4))
            # cuBLASLt is column-major: y^T [O, M] = (W^T)^T [O, K] x^T [K, M].
            self._problems[key] = _Problem(
                operation,
                self._layout(dtype, inner, outputs),
                self._layout(dtype, inner, rows),
                self._layout(dtype, outputs, rows),
            )
        return self._problems[key]

    def _layout(self, dtype: torch.dtype, rows: int, columns: int) -> c_void_p:
        layout = c_void_p()
        self._call(
            "cublasLtMatrixLayoutCreate", byref(layout), _TYPES[dtype], c_uint64(rows), c_uint64(columns), c_int64(rows)
        )
        return layout

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            raise CublasLtError(f"{name} returned status {status}")


class _Problem:
    """The descriptors of one shape, kept as long as the process; a captured graph does not need them."""

    def __init__(self, operation: c_void_p, weight: c_void_p, inputs: c_void_p, outputs: c_void_p) -> None:
        self.operation, self.weight, self.inputs, self.outputs = operation, weight, inputs, outputs


def _load() -> ctypes.CDLL:
    for name in _SONAMES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise OSError(f"none of {', '.join(_SONAMES)} could be loaded")
