"""Measure how much memory a stretch of work needs at most. Knows nothing of what the work is."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")
# what the kernel's manual calls resetting the high water mark
_RESET_PEAK = "5"


class PeakMemory:
    """The most memory of a device in use since `begin`: a GPU's, or what is resident on a CPU.

    Where the kernel gives no such number, or does not begin it anew, there is none.
    """

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._at_first: int | None = None

    def begin(self) -> None:
        """Forget what was before."""
        gc.collect()
        _give_back()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._at_first = int(torch.cuda.memory_allocated(self._device))
            return
        self._at_first = _resident("VmRSS") if _reset() else None

    def peak_bytes(self) -> int | None:
        """The most in use since then."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        return None if self._at_first is None else _resident("VmHWM")

    def grown_bytes(self) -> int | None:
        """That beyond what was in use at first."""
        peak = self.peak_bytes()
        return None if peak is None or self._at_first is None else max(0, peak - self._at_first)


def _give_back() -> None:
    """Return to the system what the C library keeps of freed memory: it is not in use."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _reset() -> bool:
    try:
        _RESET.write_text(_RESET_PEAK)
    except OSError:
        # another system, or a kernel without it
        return False
    return True


def _resident(name: str) -> int | None:
    for line in _STATUS.read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    return None
