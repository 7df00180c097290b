"""Python's garbage collector while libraries are imported.

An import of torch and transformers makes half a million objects that live until the process ends. The collector would
look at all of them several times meanwhile, a fifth of the time of the import, and again whenever the process has made
a quarter as many, which stops every thread for a tenth of a second.

Not responsible for: what is imported.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Collect nothing inside the block, and never look again at the objects that exist at its end.

    Does nothing where the collector is off already.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
