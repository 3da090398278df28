"""Measure what the largest step takes of a device's memory beside weights and KV.

Knows nothing of how KV is sized. The steps run on a few blocks that all sequences share: what they
compute means nothing, how much memory they take is as with a full pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jobrunner.engine.device_memory import DeviceMemory
from jobrunner.engine.graphs import batch_sizes
from jobrunner.engine.plan import Chunk, Decodes, Drawn, Plan
from jobrunner.engine.scheduler import Limits
from jobrunner.engine.sequence import Sequence
from jobrunner.engine.stopping import Stopping
from jobrunner.records import Request, RowId, Sampling, TextStream

# of the pool that these steps run on
SCRATCH_BLOCKS = 16
# what a driver keeps of a recorded step beside its tensors
GRAPH_BYTES = 4 << 20

# draws from sorted probabilities, which takes more than the likeliest token
_SAMPLING = Sampling(1, temperature=1.0, top_p=0.9)


class Runner(Protocol):
    """What the steps are run by: see `jobrunner.engine.engine`."""

    def run(self, plan: Plan) -> Drawn: ...


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes that steps need beside weights and KV: the largest of them, and all recorded ones."""

    step: int
    graphs: int = 0


def measure(
    runner: Runner,
    memory: DeviceMemory,
    limits: Limits,
    longest: int,
    block_size: int,
    *,
    decodes: bool,
    recorder: Runner | None = None,
    recorded_rows: int = 0,
    logit_bytes: int = 0,
) -> StepMemory:
    """Run the largest steps under these limits, of sequences of up to `longest` tokens.

    `decodes`: full batches of the longest contexts too, which memory can only hold where the
    attention reads them in place. Steps of up to `recorded_rows` are recorded by `recorder`, if
    any, and keep `logit_bytes` for each row. Raises OutOfMemoryError where there is not even
    memory for them.
    """
    rows = min(limits.max_batch_size, limits.token_budget)
    plans = [
        _prompts(limits.token_budget, rows, longest, block_size),
        _long_prompt(min(limits.chunk_size, limits.token_budget), longest, block_size),
    ]
    if decodes:
        plans.append(_decodes(rows, longest, block_size))
    memory.give_back()
    before = memory.allocated()
    memory.begin_peak()
    for plan in plans:
        runner.run(plan)
    step = max(0, memory.peak() - before)
    if recorder is None:
        return StepMemory(step)
    memory.give_back()
    before = memory.reserved()
    # it is recorded when it is first run
    recorder.run(_decodes(recorded_rows, longest, block_size))
    memory.give_back()
    recorded = max(0, memory.reserved() - before)
    return StepMemory(step, recorded + smaller_graphs(recorded_rows, logit_bytes))


def smaller_graphs(most: int, logit_bytes: int) -> int:
    """Bytes of all recorded steps but the largest, whose memory they share except for outputs."""
    smaller = batch_sizes(most)[:-1]
    return sum(smaller) * logit_bytes + len(smaller) * GRAPH_BYTES


def _prompts(tokens: int, rows: int, longest: int, block_size: int) -> Plan:
    """So many tokens in prompts of so many rows, each of which draws a token."""
    least, more = divmod(tokens, rows)
    lengths = [min(longest, least + (row < more)) for row in range(rows)]
    return Plan(
        prefills=[
            Chunk(_sequence(row, length, block_size), 0, length, samples=True)
            for row, length in enumerate(lengths)
        ]
    )


def _long_prompt(chunk: int, longest: int, block_size: int) -> Plan:
    """The last piece of the longest prompt."""
    start = max(0, longest - chunk)
    return Plan(prefills=[Chunk(_sequence(0, longest, block_size), start, longest, samples=True)])


def _decodes(rows: int, longest: int, block_size: int) -> Plan:
    """A token for each of so many of the longest sequences."""
    sequence = _sequence(0, longest, block_size)
    sequences = np.empty(rows, object)
    sequences[:] = [sequence] * rows
    return Plan(
        Decodes(
            sequences=sequences,
            slots=np.arange(rows),
            starts=np.full(rows, longest - 1, np.int64),
            tokens=np.zeros(rows, np.int64),
            follows=np.full(rows, -1, np.int64),
            rows=np.zeros(rows, np.int64),
            ruled=np.ones(rows, np.int64),
            table=np.tile(np.array(sequence.blocks, np.int32), (rows, 1)),
        )
    )


def _sequence(row: int, length: int, block_size: int) -> Sequence:
    request = Request(RowId("the largest step", row), [0] * length, _SAMPLING)
    sequence = Sequence(request, Stopping(_SAMPLING, _no_text), 0.0)
    sequence.blocks = _shared(-(-length // block_size))
    return sequence


def _shared(count: int) -> list[int]:
    return [block % SCRATCH_BLOCKS for block in range(count)]


def _no_text() -> TextStream:
    raise AssertionError("nobody looks for stop strings")
