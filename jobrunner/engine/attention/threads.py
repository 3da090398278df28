"""Run compiled code on the threads that torch has already. Knows nothing of what it does.

Two pools of threads on the same processors would wait for each other. numba's own links to the
OpenMP of the system, torch on Linux brings its own; that one's entry point is what compilers call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

# the address of a C function, that of its argument, and how many threads shall call it
RunOnThreads = Callable[[int, int, int], None]


@cache
def torch_threads() -> RunOnThreads | None:
    """Return what calls a function once on each of torch's threads; None if they are not GNU's."""
    folder = Path(torch.__file__).parent
    # wheels that were repaired for Linux keep libraries beside the package
    for path in (*folder.glob("lib/libgomp*.so*"), *folder.parent.glob("torch.libs/libgomp*.so*")):
        run = ctypes.CDLL(str(path)).GOMP_parallel
        run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        run.restype = None
        return lambda function, argument, threads: run(function, argument, threads, 0)
    return None
