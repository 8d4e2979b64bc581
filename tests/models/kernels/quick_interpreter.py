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
_broadcast, _checked, _constant = (
    TritonSemantic.broadcast_impl_value,
    TritonSemantic.binary_op_type_checking_impl,
    TritonSemantic.scalar_constant,
)
_binary_op = interpreter.InterpreterBuilder.binary_op
_BUILTIN = core.builtin(len).__code__

_patched: list[set[int]] = []  # of the launches in progress: the modules that are patched until it has ended
_np_dtypes: dict[str, Any] = {}
_shapes: dict[tuple[int, ...], Any] = {}  # of a block: (shape, number of elements) as Triton's constants
_block_types: dict[tuple[Any, ...], Any] = {}  # by name of the element and shape: (shape, number of elements, name)
_pairs: dict[tuple[Any, ...], Any] = {}  # operands by type and shape, and what else is asked: types in place of theirs
_constants: dict[tuple[Any, ...], Any] = {}  # by kind, value and type: scalars that are as they are in every launch
_operands: dict[tuple[Any, ...], Any] = {}  # constants beside a tensor of some type and shape
_langs: dict[Any, set[int]] = {}  # of a function: modules of the language among its globals


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
    langs = _langs.get(fn)
    if langs is None:
        langs = {id(value) for value in fn.__globals__.values() if value is tl or value is tl.core}
        _langs[fn] = langs
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
    if getattr(member, "__code__", None) is _BUILTIN:
        member = member.__wrapped__  # which the decorator only calls

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


def _constant_once(self: Any, value: Any, dtype: Any) -> Any:
    key = type(value), value, math.copysign(1.0, value), dtype.name
    if (known := _constants.get(key)) is None:
        known = _constants[key] = _constant(self, value, dtype)
    return known


def _checked_once(self: Any, lhs: Any, rhs: Any, *asked: bool, **named: bool) -> Any:
    """Both operands in one type and shape. What that takes depends on their types and on values of constants.

    numpy broadcasts by itself, so an operand that is only too small gets the type of the result, and keeps its data.
    """
    if named or not (type(lhs) is type(rhs) is tl.tensor):
        return _with_constant(self, lhs, rhs, *asked) if not named else _checked(self, lhs, rhs, *asked, **named)
    key = lhs.type.name, rhs.type.name, asked
    if (known := _pairs.get(key)) is not None:
        left, right = known
        return lhs if left is None else tl.tensor(lhs.handle, left), rhs if right is None else tl.tensor(
            rhs.handle, right
        )
    found = _checked(self, lhs, rhs, *asked)
    if found[0].dtype == lhs.dtype and found[1].dtype == rhs.dtype:
        _pairs[key] = tuple(None if new is old else new.type for new, old in zip(found, (lhs, rhs), strict=True))
    return found


def _with_constant(self: Any, lhs: Any, rhs: Any, *asked: bool) -> Any:
    first = type(rhs) is tl.tensor
    constant, tensor = (lhs, rhs) if first else (rhs, lhs)
    if type(tensor) is not tl.tensor or type(constant) not in (int, float) or constant != constant:
        return _checked(self, lhs, rhs, *asked)
    key = tensor.type.name, type(constant), constant, math.copysign(1.0, constant), first, asked
    known = _operands.get(key)
    if known is None:
        found = _checked(self, lhs, rhs, *asked)
        if found[first] is not tensor:
            return found
        known = _operands[key] = found[not first]
    return (known, tensor) if first else (tensor, known)


def _broadcast_what_differs(self: Any, lhs: Any, rhs: Any) -> Any:
    lhs_ty, rhs_ty = lhs.type, rhs.type
    if lhs_ty.is_block():
        alike = rhs_ty.is_block() and lhs_ty.shape.values == rhs_ty.shape.values
    else:
        alike = not rhs_ty.is_block()
    return (lhs, rhs) if alike else _broadcast(self, lhs, rhs)


def _binary_op_of_one_type(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
    output = op(lhs.data, rhs.data)
    if output.dtype is not lhs.data.dtype:
        return _binary_op(self, lhs, rhs, lambda left, right: output)
    return interpreter.TensorHandle(output, lhs.dtype.scalar)


def _handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr


def _mend() -> None:
    core._unwrap_if_constexpr = _unwrap_at_once
    tl.dtype.__eq__ = _same_dtype_at_once
    tl.block_type.__init__ = _block_type_once
    TritonSemantic.broadcast_impl_value = _broadcast_what_differs
    TritonSemantic.binary_op_type_checking_impl = _checked_once
    TritonSemantic.scalar_constant = _constant_once
    interpreter.InterpreterBuilder.binary_op = _binary_op_of_one_type
    interpreter.TensorHandle.__init__ = _handle
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
