"""Tell a lack of memory from other failures, and say what it was wanted for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from jobrunner.errors import HostMemoryError, InfrastructureError, lacks_host_memory

_NO_MEMORY = ("out of memory", "cublas_status_alloc_failed")


def lacks_memory(error: BaseException) -> bool:
    """Whether a device or the host had no memory."""
    if isinstance(error, torch.OutOfMemoryError) or lacks_host_memory(error):
        return True
    return isinstance(error, RuntimeError) and any(
        words in str(error).lower() for words in _NO_MEMORY
    )


@contextmanager
def memory_for(what: str, lower: str) -> Iterator[None]:
    """Turn a lack of memory into an InfrastructureError: for `what`, and what to `lower`."""
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        if not lacks_memory(error):
            raise
        on_host = lacks_host_memory(error)
        kind = HostMemoryError if on_host else InfrastructureError
        where = "this machine" if on_host else "the device"
        raise kind(
            f"{where} has no memory for {what}: {error}",
            hint=f"let nobody else use it, or lower {lower}, then run the same command again",
        ) from error
