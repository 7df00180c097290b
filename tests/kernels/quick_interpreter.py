"""Triton's interpreter without work whose result it discards or has. Values and accesses to memory are the same.

- Triton patches its language at each launch and at each call of a device function, which looks at every name of four
  modules. Here it is patched once in a process.
- It computes each sum, difference and product of integers again in 64 bits, for a check of overflow that only an
  interpreter in debug mode makes.
- It makes a table of types at each operation, and the shape of each value from that of its type.
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
