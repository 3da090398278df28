"""Bring numbers to a device without waiting for it. Knows nothing of what they mean."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from jobrunner.engine.devices import to_device
from jobrunner.engine.streams import Lane, Mark, Streams, wait_for

Numbers = np.ndarray
Put = Callable[[Numbers], torch.Tensor]

# a step has few numbers: this grows where one has more
_FIRST_BYTES = 1 << 20
_ALIGNED_BYTES = 64
_SETS = 2


@runtime_checkable
class TakesInputs(Protocol):
    """Attention that brings its numbers to the device by what it is given."""

    def take_inputs(self, put: Put) -> None: ...


class InputSets:
    """Two sets of page-locked memory that launches use in turns.

    A copy to the device reads them when the device gets there. A set is written again when the
    device is done with the launch that used it: with a host that is one step ahead of it this is
    known by then.
    """

    def __init__(
        self, device: torch.device, streams: Streams, *, staged: bool | None = None
    ) -> None:
        self._device = device
        self._streams = streams
        # a CPU reads the numbers where they are
        self._staged = device.type == "cuda" if staged is None else staged
        self._sets = [_Set(device) for _ in range(_SETS if self._staged else 0)]
        self._turn = 0

    @contextmanager
    def launch(self) -> Iterator[None]:
        """Use a set for what is launched in the block, once the device is done with it."""
        if not self._staged:
            yield
            return
        self._turn = (self._turn + 1) % _SETS
        mine = self._sets[self._turn]
        mine.free()
        try:
            yield
        finally:
            mine.used_until = self._streams.mark(Lane.COMPUTE)

    def put(self, numbers: Numbers) -> torch.Tensor:
        """Copy numbers to the device, in the order of its work."""
        if not self._staged:
            return to_device(numbers, self._device)
        here = self._sets[self._turn].store(numbers)
        return here.to(self._device, non_blocking=True)


class _Set:
    def __init__(self, device: torch.device) -> None:
        self.used_until: Mark | None = None
        self._pinned = device.type == "cuda"
        self._memory = self._new(_FIRST_BYTES)
        self._used = 0
        # too small for a launch that may still read them
        self._outgrown: list[torch.Tensor] = []

    def free(self) -> None:
        if self.used_until is not None:
            wait_for(self.used_until)
        self._used = 0
        self._outgrown.clear()

    def store(self, numbers: Numbers) -> torch.Tensor:
        first = -(-self._used // _ALIGNED_BYTES) * _ALIGNED_BYTES
        stop = first + numbers.nbytes
        if stop > len(self._memory):
            self._outgrown.append(self._memory)
            self._memory = self._new(2 * max(len(self._memory), numbers.nbytes))
            first, stop = 0, numbers.nbytes
        self._used = stop
        given = torch.from_numpy(np.ascontiguousarray(numbers))
        here = self._memory[first:stop].view(given.dtype).view(given.shape)
        return here.copy_(given)

    def _new(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8, pin_memory=self._pinned)
