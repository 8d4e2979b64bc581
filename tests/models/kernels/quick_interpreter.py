"""Triton's interpreter, mended for today's numpy, and without work whose result nobody reads. Importing it is enough.

Knows: the parts of Triton 3.6's interpreter that take most of its time beside numpy: half of it, all told. Another
version that has other parts is left as it is. Does not know: any kernel. Changes no number: a kernel's operations are
the same ones, in the same order.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

_patch_tensor, _patch_lang = interpreter._patch_lang_tensor, interpreter._patch_lang
_np_dtype = interpreter._get_np_dtype

_patched: list[set[int]] = []  # of the launches in progress: the modules that are patched until it has ended
_np_dtypes: dict[str, Any] = {}
_shapes: dict[tuple[int, ...], Any] = {}  # of a block: (shape, number of elements) as Triton's constants


def _patch_tensor_for_new_numpy(tensor: Any, scope: Any) -> None:
    """Triton 3.6 makes loop bounds of arrays with one element, which numpy 2.4 no longer takes for numbers."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


class _Launch:
    """What a launch restores at its end. Its device functions find the language patched, and need not search it."""

    def __init__(self, scope: Any) -> None:
        self._scope = scope

    def restore(self) -> None:
        _patched.pop()
        self._scope.restore()


def _patch_once(fn: Any) -> Any:
    langs = {id(value) for value in fn.__globals__.values() if value is tl or value is tl.core}
    if _patched and langs <= _patched[-1]:
        return None  # a device function's: nobody restores it
    if _patched:
        _patched[-1] |= langs
        return _patch_lang(fn)
    _patched.append(langs)
    return _Launch(_patch_lang(fn))


def _np_dtype_once(dtype: Any) -> Any:
    name = str(dtype.element_ty if isinstance(dtype, tl.block_type) else dtype)
    if name not in _np_dtypes:
        _np_dtypes[name] = _np_dtype(dtype)
    return _np_dtypes[name]


def _tensor_with_known_shape(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    sizes = (*type.shape,) if type.is_block() else ()
    if sizes not in _shapes:
        _shapes[sizes] = (tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes)))
    self.shape, self.numel = _shapes[sizes]


def _mend() -> None:
    interpreter._patch_lang_tensor = _patch_tensor_for_new_numpy
    interpreter._patch_lang = _patch_once
    interpreter._get_np_dtype = _np_dtype_once
    tl.tensor.__init__ = _tensor_with_known_shape
    # Sums are computed again in 64 bits to assert that 32 were enough; without ``debug`` the assertion is dropped.
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


_mend()
