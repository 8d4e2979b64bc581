"""Triton's interpreter, mended for today's numpy, and without work whose result nobody reads. Importing it is enough.
ALL: a program was started with ``--all``, and runs cases, too, for which `make test` has no time.

Knows: the parts of Triton 3.6's interpreter that take most of its time beside numpy: half of it, all told. Another
version that has other parts is left as it is. Does not know: any kernel. Changes no number: a kernel's operations are
the same ones, in the same order.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import Any

import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

ALL = "--all" in sys.argv

_patch_tensor, _patch_lang = interpreter._patch_lang_tensor, interpreter._patch_lang
_np_dtype = interpreter._get_np_dtype
_unwrap, _block_type, _same_dtype = core._unwrap_if_constexpr, tl.block_type.__init__, tl.dtype.__eq__
_computation_type, _broadcast = TritonSemantic.computation_type_impl, TritonSemantic.broadcast_impl_value

_patched: list[set[int]] = []  # of the launches in progress: the modules that are patched until it has ended
_np_dtypes: dict[str, Any] = {}
_shapes: dict[tuple[int, ...], Any] = {}  # of a block: (shape, number of elements) as Triton's constants
_block_types: dict[tuple[Any, ...], Any] = {}  # by name of the element and shape: (shape, number of elements, name)
_computation_types: dict[tuple[Any, ...], Any] = {}  # by names of both types, and what else is asked


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


def _patch_attr_in_one_call(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    semantic = TritonSemantic(builder)

    def new_member(*args: Any, member: Any = member, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return member(*args, **kwargs)

    scope.set_attr(obj, name, new_member)


def _unwrap_at_once(o: Any) -> Any:
    kind = type(o)
    if kind is tl.constexpr:
        return o.value
    return o if kind is int or kind is tl.dtype or kind is tl.tensor else _unwrap(o)


def _same_dtype_at_once(self: Any, other: Any) -> bool:
    return bool(self.name == other.name if type(other) is tl.dtype else _same_dtype(self, other))


def _block_type_once(self: Any, element_ty: Any, shape: Any) -> None:
    sizes = shape.values if type(shape) is tl.tuple else shape
    key = (element_ty.name, *(size.value if type(size) is tl.constexpr else size for size in sizes))
    if (known := _block_types.get(key)) is None:
        _block_type(self, element_ty, shape)  # raises for shapes that there are not
        known = _block_types[key] = self.shape, self.numel, self.name
    self.element_ty = element_ty
    self.shape, self.numel, self.name = known


def _computation_type_once(self: Any, a_ty: Any, a_is_scalar: bool, b_ty: Any, b_is_scalar: bool, div: bool) -> Any:
    key = a_ty.name, a_is_scalar, b_ty.name, b_is_scalar, div
    if (known := _computation_types.get(key)) is None:
        known = _computation_types[key] = _computation_type(self, a_ty, a_is_scalar, b_ty, b_is_scalar, div)
    return known


def _broadcast_what_differs(self: Any, lhs: Any, rhs: Any) -> Any:
    lhs_ty, rhs_ty = lhs.type, rhs.type
    if lhs_ty.is_block():
        alike = rhs_ty.is_block() and lhs_ty.shape.values == rhs_ty.shape.values
    else:
        alike = not rhs_ty.is_block()
    return (lhs, rhs) if alike else _broadcast(self, lhs, rhs)


def _mend() -> None:
    core._unwrap_if_constexpr = _unwrap_at_once
    tl.dtype.__eq__ = _same_dtype_at_once
    tl.block_type.__init__ = _block_type_once
    TritonSemantic.computation_type_impl = _computation_type_once
    TritonSemantic.broadcast_impl_value = _broadcast_what_differs
    interpreter._patch_attr = _patch_attr_in_one_call
    interpreter._patch_lang_tensor = _patch_tensor_for_new_numpy
    interpreter._patch_lang = _patch_once
    interpreter._get_np_dtype = _np_dtype_once
    tl.tensor.__init__ = _tensor_with_known_shape
    # Sums are computed again in 64 bits to assert that 32 were enough; without ``debug`` the assertion is dropped.
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


_mend()
