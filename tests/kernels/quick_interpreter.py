"""Triton's interpreter without work whose result it discards or has. Values and accesses to memory are the same.

- Triton patches its language at each launch and at each call of a device function, which looks at every name of four
  modules. Here it is patched once in a process, by functions that do not check where they are called.
- It computes each sum, difference and product of integers again in 64 bits, for a check of overflow that only an
  interpreter in debug mode makes.
- It makes a table of types at each operation, and the shape of each value from that of its type.
- It checks that each value's array is not wider than its type.
- It makes the type of each block anew, and looks at every pair of operands for a promotion or a broadcast. Here types
  are made once, operands of one type pass at once, and a number next to an operand becomes a block once.
"""

from __future__ import annotations

import types
from functools import cache
from typing import Any


@cache
def quicken() -> None:
    """Quicken the interpreter of this process; it stays so."""
    import triton.language as tl
    from triton.runtime import interpreter

    def bind(owner: Any, name: str, member: Any, builder: object, scope: Any) -> None:
        function, semantic = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic

        def bound(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        scope.set_attr(owner, name, bound)

    interpreter._patch_attr = bind
    # The patch looks for the language among the global names of the function that runs.
    interpreter._patch_lang(types.FunctionType(quicken.__wrapped__.__code__, {"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    make, shapes = tl.tensor.__init__, dict[Any, tuple[Any, Any]]()
    in_numpy, of_numbers = interpreter._get_np_dtype, cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda type: (in_numpy if type.scalar.is_ptr() else of_numbers)(type.scalar)

    def make_of_known_shape(self: tl.tensor, handle: object, type: tl.dtype) -> None:
        key = (*type.shape,) if type.is_block() else ()
        if key not in shapes:
            make(self, handle, type)
            shapes[key] = self.numel, self.shape
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = shapes[key]

    tl.tensor.__init__ = make_of_known_shape
    interpreter.TensorHandle.__init__ = _fill_handle
    _make_types_once(tl.block_type)
    _pass_equal_operands(type(interpreter.interpreter_semantic), tl.tensor)


def _fill_handle(self: Any, data: object, dtype: object, attr: dict[str, object] | None = None) -> None:
    self.data, self.dtype, self.attr = data, dtype, attr or {}


UNPROMOTED = {"int1", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)), "fp32", "fp64"}
"""Types whose operations, also divisions, have operands of the same type."""


def _make_types_once(block_type: Any) -> None:
    fill, known = block_type.__init__, dict[tuple[Any, ...], Any]()

    def make(cls: Any, element_ty: Any, shape: Any) -> Any:
        key = (element_ty.name, getattr(element_ty, "address_space", 0), *shape)
        if key not in known:
            made = object.__new__(cls)
            fill(made, element_ty, shape)
            known[key] = made
        return known[key]

    block_type.__new__, block_type.__init__ = make, lambda self, element_ty, shape: None


def _pass_equal_operands(semantic: Any, tensor: Any) -> None:
    check, broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value
    numbers = dict[tuple[Any, ...], Any]()

    def checked(self: Any, lhs: Any, rhs: Any, *options: bool, **named: bool) -> tuple[Any, Any]:
        if lhs.__class__ is tensor:
            if rhs.__class__ is tensor:
                pointers = options == (True, True) and lhs.dtype.is_ptr() and rhs.dtype.is_int()
                if pointers or (lhs.dtype is rhs.dtype and lhs.dtype.name in UNPROMOTED):
                    return (lhs, rhs) if lhs.type is rhs.type else self.broadcast_impl_value(lhs, rhs)
            elif lhs.dtype.name in UNPROMOTED and rhs.__class__ in (int, float):
                key = (lhs.type.name, rhs.__class__, rhs, options, *named.items())
                if key in numbers:
                    return lhs, numbers[key]
                found, number = check(self, lhs, rhs, *options, **named)
                if found is lhs:
                    number.handle.data.flags.writeable = False
                    numbers[key] = number
                return found, number
        result: tuple[Any, Any] = check(self, lhs, rhs, *options, **named)
        return result

    def broadcast_of_shapes(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        a, b = lhs.type, rhs.type
        if a is b or (a.is_block() and b.is_block() and a.shape.values == b.shape.values):
            return lhs, rhs
        result: tuple[Any, Any] = broadcast(self, lhs, rhs)
        return result

    semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value = checked, broadcast_of_shapes
