"""Record whole decode steps and play them again. Knows nothing of plans, rows or models.

A step is recorded once for each of some batch sizes, over tensors that stay where they are; then
a batch is written into them, filled up with rows of one token in the trash block, and played.

Shapes: B rows of a batch, R rows of the size that it is filled up to, V vocabulary.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from jobrunner.engine.attention.device_paged import DecodeTables
from jobrunner.engine.attention.hook import Singles
from jobrunner.engine.lack import lacks_memory
from jobrunner.engine.streams import Lane, Mark, Streams, streams_of, wait_for

log = logging.getLogger("cbjob")

Numbers = np.ndarray

# of each row: token, position, slot, length, row of the table, whom it follows, row of its logits
_COLUMNS = 7
_SETS = 2
# steps after which it is tried again to record a size that there was no memory for: then twice as
# many, because a try takes longer than what it saves in a few steps
_FIRST_PAUSE = 256


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """Of one token each of R sequences, `[R]`; `follows` is -1, or who drew it the step before."""

    tokens: torch.Tensor
    positions: torch.Tensor
    follows: torch.Tensor
    logit_rows: torch.Tensor
    tables: DecodeTables


@dataclass(frozen=True, slots=True, eq=False)
class StepOutputs:
    """Of a step: logits, `[B, V]`, the likeliest tokens, and whose are finite, `[B]`."""

    logits: torch.Tensor
    tokens: torch.Tensor
    finite: torch.Tensor

    def first(self, count: int) -> StepOutputs:
        """Those of so many rows."""
        return StepOutputs(self.logits[:count], self.tokens[:count], self.finite[:count])


Step = Callable[[StepInputs], StepOutputs]
# what plays a step again over the same tensors, and where its outputs are then
Replay = tuple[Callable[[], None], StepOutputs]
Record = Callable[[Step, StepInputs], Replay]


class CudaRecorder:
    """Records CUDA graphs that share their memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, step: Step, inputs: StepInputs) -> Replay:
        """Run the step twice, so that all is compiled and allocated, then record it."""
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            for _ in range(2):
                step(inputs)
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            outputs = step(inputs)
        return graph.replay, outputs


class DecodeGraphs:
    """Plays decode steps of up to `most` sequences, each of at most `longest` tokens.

    Sizes are recorded when they are first needed. The batch is written through one of two sets of
    page-locked memory, so that the host may prepare a step while the one before is still read.
    """

    def __init__(
        self,
        step: Step,
        record: Record,
        device: torch.device,
        *,
        most: int,
        longest: int,
        block_size: int,
        trash_block: int,
        streams: Streams | None = None,
    ) -> None:
        self._step = step
        self._record = record
        self._device = device
        self._block_size = block_size
        self._trash_block = trash_block
        self._sizes = batch_sizes(most)
        self._width = -(-longest // block_size)
        self._numbers = torch.zeros(_COLUMNS, most, dtype=torch.long, device=device)
        self._table = torch.zeros(most, self._width, dtype=torch.int32, device=device)
        streams = streams or streams_of(device)
        self._sets = [_HostSet(most, self._width, device, streams) for _ in range(_SETS)]
        self._turn = 0
        self._replays: dict[int, Replay] = {}
        self._cannot_record = False
        self._pause = _Pause()

    def serves(self, singles: Singles) -> bool:
        """Whether a step of these and nothing else can be played, as far as is known."""
        if self._cannot_record:
            return False
        count = len(singles)
        blocks = -(-int(singles.lengths[-1]) // self._block_size) if count else 0
        return 0 < count <= self._sizes[-1] and blocks <= self._width

    def run(
        self,
        singles: Singles,
        tokens: Numbers,
        logit_rows: Numbers,
        follows: tuple[Numbers, Numbers] | None,
    ) -> StepOutputs | None:
        """Play the step of these sequences; its outputs hold until the next one of their size.

        None where the step is to be launched one operation at a time: because the model cannot be
        recorded, from then on nothing is served, or because there is no memory to record this size.
        `follows` are places of tokens among them, and in what the step before drew.
        """
        size = self._sizes[bisect_left(self._sizes, len(singles))]
        if not self._recorded(size):
            return None
        replay, outputs = self._replays[size]
        self._write(size, singles, tokens, logit_rows, follows)
        replay()
        return outputs.first(len(singles))

    def _recorded(self, size: int) -> bool:
        """Whether this size is recorded, if need be now."""
        if size in self._replays:
            return True
        if self._pause.lasts(size):
            return False
        try:
            self._replays[size] = self._record_size(size)
        except (RuntimeError, MemoryError) as error:
            self._give_up(size, error)
            return False
        return True

    def _give_up(self, size: int, error: Exception) -> None:
        """Launch steps of this size by operations, for a while if only memory was lacking."""
        slower = "launched one operation at a time, slower"
        if not lacks_memory(error):
            self._cannot_record = True
            log.warning("decode steps are %s: %s", slower, error)
            return
        steps = self._pause.begin(size)
        log.warning(
            "no memory to record decode steps of %d rows: the next %d are %s: %s",
            *(size, steps, slower, error),
        )

    def _record_size(self, size: int) -> Replay:
        started = time.perf_counter()
        nobody = np.zeros(0, np.int64)
        # recording runs the step: only the trash block may be written
        self._write(size, Singles(), nobody, nobody, None)
        replay = self._record(self._step, self._inputs(size))
        log.info("recorded decode steps of %d rows in %.1f s", size, time.perf_counter() - started)
        return replay

    def _inputs(self, size: int) -> StepInputs:
        tokens, positions, slots, lengths, rows, follows, logit_rows = self._numbers[:, :size]
        return StepInputs(
            tokens=tokens,
            positions=positions,
            follows=follows,
            logit_rows=logit_rows,
            tables=DecodeTables(slots=slots, lengths=lengths, rows=rows, table=self._table[:size]),
        )

    def _write(
        self,
        size: int,
        singles: Singles,
        tokens: Numbers,
        logit_rows: Numbers,
        follows: tuple[Numbers, Numbers] | None,
    ) -> None:
        host = self._sets[self._turn]
        self._turn = (self._turn + 1) % _SETS
        host.wait()
        count, block_size = len(singles), self._block_size
        numbers, table = host.numbers, host.table
        trash = [0, 0, self._trash_block * block_size, 1, 0, -1, 0]
        numbers[:, count:size] = np.array(trash)[:, None]
        # the rows of the table are in the order of the batch
        numbers[4, :size] = numbers[6, :size] = np.arange(size)
        table[count:size, 0] = self._trash_block
        if count:
            used = -(-int(singles.lengths[-1]) // block_size)
            table[:count, :used] = singles.table[singles.rows, :used]
            last = singles.lengths - 1
            block = table[np.arange(count), last // block_size].astype(np.int64)
            numbers[0, :count] = tokens
            numbers[1, :count] = last
            numbers[2, :count] = block * block_size + last % block_size
            numbers[3, :count] = singles.lengths
            numbers[5, :count] = -1
            numbers[6, :count] = logit_rows
            if follows is not None:
                places, drawn_at = follows
                numbers[5, places] = drawn_at
        self._numbers.copy_(host.pinned_numbers, non_blocking=True)
        self._table[:size].copy_(host.pinned_table[:size], non_blocking=True)
        host.sent()


class _HostSet:
    """Memory of the host that a copy to the device reads; free again once that has happened."""

    def __init__(self, most: int, width: int, device: torch.device, streams: Streams) -> None:
        on_gpu = device.type == "cuda"
        self.pinned_numbers = torch.zeros(_COLUMNS, most, dtype=torch.long, pin_memory=on_gpu)
        self.pinned_table = torch.zeros(most, width, dtype=torch.int32, pin_memory=on_gpu)
        self.numbers: Numbers = self.pinned_numbers.numpy()
        self.table: Numbers = self.pinned_table.numpy()
        self._streams = streams
        self._read_until: Mark | None = None

    def wait(self) -> None:
        if self._read_until is not None:
            wait_for(self._read_until)

    def sent(self) -> None:
        self._read_until = self._streams.mark(Lane.COMPUTE)


class _Pause:
    """How long not to try to record a size that there was no memory for, and larger ones."""

    def __init__(self) -> None:
        self._size = 0
        self._left = 0
        self._next = _FIRST_PAUSE

    def begin(self, size: int) -> int:
        """Return how many steps of this size or more it lasts."""
        self._size, self._left = size, self._next
        self._next *= 2
        return self._left

    def lasts(self, size: int) -> bool:
        """Whether a step of this size is one of them."""
        if size < self._size or self._left == 0:
            return False
        self._left -= 1
        return True


def batch_sizes(most: int) -> Sequence[int]:
    """The sizes that batches are filled up to: few, and never by much; the last is `most`."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 32), *range(256, most, 128)]
    return [*(size for size in sizes if size < most), most]
