"""Ask a device about its memory. Knows nothing of what the memory is for."""

from __future__ import annotations

import gc
from typing import Protocol

import torch


class DeviceMemory(Protocol):
    """What a device says of its memory, in bytes."""

    def total(self) -> int:
        """All that it has."""

    def free(self) -> int:
        """What nobody holds, neither this process nor another."""

    def reserved(self) -> int:
        """What this process holds for tensors, those that are gone included."""

    def allocated(self) -> int:
        """What its tensors take."""

    def begin_peak(self) -> None:
        """Count the peak anew."""

    def peak(self) -> int:
        """The most that tensors took at a time since then."""

    def give_back(self) -> None:
        """Free what is held for tensors that are gone."""


class CudaMemory:
    """The memory of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[1])

    def free(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])

    def reserved(self) -> int:
        return int(torch.cuda.memory_reserved(self._device))

    def allocated(self) -> int:
        return int(torch.cuda.memory_allocated(self._device))

    def begin_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        return int(torch.cuda.max_memory_allocated(self._device))

    def give_back(self) -> None:
        # what is only held by cycles is gone as well
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
