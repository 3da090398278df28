"""Decide which tokens are computed next. Knows nothing of tensors, files or text."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import repeat

from jobrunner.engine.blocks import Blocks
from jobrunner.engine.sequence import Sequence
from jobrunner.engine.stopping import Ending, OpenText, Stopping
from jobrunner.records import Completion, Request, RowError, TokenLogprob


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a step, in sequences and tokens, and of the waiting window, in rows."""

    max_batch_size: int
    token_budget: int
    chunk_size: int
    lookahead: int

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 1")


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start` up to, not including, `stop` of a sequence.

    `samples` says that the logits of its last token give the next one.
    """

    sequence: Sequence
    start: int
    stop: int
    samples: bool
    decode: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """What one step computes: at most one chunk of a sequence, decodes first."""

    chunks: Seq[Chunk]
    completions: Seq[Completion]
    preemptions: int
    tokens_cached: int

    @property
    def prefill_tokens(self) -> int:
        return sum(chunk.stop - chunk.start for chunk in self.chunks if not chunk.decode)

    @property
    def decode_tokens(self) -> int:
        return sum(1 for chunk in self.chunks if chunk.decode)

    @property
    def tokens_recomputed(self) -> int:
        return sum(
            max(0, min(chunk.stop, chunk.sequence.computed_before) - chunk.start)
            for chunk in self.chunks
        )


@dataclass(frozen=True, slots=True)
class Drawn:
    """What came of a plan: one token per sampling chunk, in the order of the plan.

    `logprobs` runs beside the tokens, None for a row that wants none; it is empty where no row
    wants any.
    """

    tokens: Seq[int] = ()
    logprobs: Seq[TokenLogprob | None] = ()


class Scheduler:
    """Keeps waiting and running sequences and shares out slots, blocks and the token budget.

    `plan` and `commit` alternate; between them the caller computes what the plan says. Times
    are seconds of any clock, passed in.
    """

    def __init__(self, blocks: Blocks, limits: Limits, open_text: OpenText) -> None:
        self.blocks = blocks
        self.limits = limits
        self._open_text = open_text
        self._running: list[Sequence] = []
        # rows with generated tokens, preempted or resumed, go before new ones
        self._returning: deque[Sequence] = deque()
        self._fresh: deque[Sequence] = deque()
        self._admissions = 0

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._returning) + len(self._fresh)

    @property
    def room(self) -> int:
        """How many more requests the waiting window takes."""
        return max(0, self.limits.lookahead - self.waiting)

    def add(self, request: Request, now: float) -> Completion | None:
        """Queue a request; one that is complete as it comes is returned as its completion."""
        sequence = Sequence(request, Stopping(request.sampling, self._open_text), now)
        if sequence.prompt_length == 0:
            error = RowError("empty_prompt", f"{request.id} has no token to start with")
            return _completion(sequence, now, error=error)
        count, ending = sequence.stopping.replay(request.output)
        if ending is not None:
            sequence.cut(count)
            return _completion(sequence, now, ending=ending)
        (self._returning if sequence.output_length else self._fresh).append(sequence)
        return None

    def unfinished(self) -> Iterator[Sequence]:
        """Every sequence that is running or waiting."""
        yield from self._running
        yield from self._returning
        yield from self._fresh

    def plan(self, now: float) -> Plan:
        """Share out one token budget: decodes, then running prompts, then new sequences."""
        completions: list[Completion] = []
        chunks, preemptions = self._decodes(now, completions)
        budget = self.limits.token_budget - len(chunks)
        for sequence in self._prefilling():
            if budget == 0:
                break
            chunks.append(self._chunk(sequence, budget))
            budget -= chunks[-1].stop - chunks[-1].start
        cached = 0
        # whoever was just preempted would take back the blocks it had to give
        while budget > 0 and not preemptions:
            admitted = self._admit(now, completions)
            if admitted is None:
                break
            cached += admitted.computed
            chunks.append(self._chunk(admitted, budget))
            budget -= chunks[-1].stop - chunks[-1].start
        return Plan(chunks, completions, preemptions, cached)

    def commit(self, plan: Plan, drawn: Drawn, now: float) -> list[Completion]:
        """Book a computed plan and the tokens that were drawn by it."""
        completions: list[Completion] = []
        sampled = zip(drawn.tokens, drawn.logprobs or repeat(None), strict=False)
        for chunk in plan.chunks:
            sequence = chunk.sequence
            self._advance(sequence, chunk.stop)
            sequence.chunks += not chunk.decode
            if not chunk.samples:
                continue
            token, logprob = next(sampled)
            sequence.append(token, now, logprob)
            ending = sequence.stopping.after(token)
            if ending is not None:
                self._leave(sequence)
                completions.append(_completion(sequence, now, ending=ending))
        return completions

    def check(self) -> None:
        """Raise AssertionError unless slots, queues and blocks agree with each other."""
        self.blocks.check()
        most = min(self.limits.max_batch_size, self.limits.token_budget)
        assert len(self._running) <= most, "more running than slots or tokens in a step"
        references = [0] * self.blocks.count
        for slot, sequence in enumerate(self._running):
            assert sequence.slot == slot, "a sequence does not know its slot"
            assert sequence.remaining >= 1, "a running sequence has nothing to compute"
            assert not sequence.decoding or sequence.remaining == 1, "a decode fell behind"
            assert len(set(sequence.blocks)) == len(sequence.blocks), "a block is held twice"
            assert len(sequence.blocks) * self.blocks.block_size >= sequence.computed, (
                "computed tokens have no block"
            )
            full = sequence.computed // self.blocks.block_size
            assert all(self.blocks.holders(block) == 1 for block in sequence.blocks[full:]), (
                "a block that is still written is shared"
            )
            for block in sequence.blocks:
                references[block] += 1
        assert references == [self.blocks.holders(block) for block in range(self.blocks.count)], (
            "reference counts differ from what sequences hold"
        )
        for sequence in (*self._returning, *self._fresh):
            assert sequence.slot is None, "a waiting sequence has a slot"
            assert not sequence.blocks, "a waiting sequence holds blocks"
            assert sequence.computed == 0, "a waiting sequence has computed tokens"

    def _decodes(self, now: float, completions: list[Completion]) -> tuple[list[Chunk], int]:
        # all of them fit the budget: a sequence is only admitted while the others leave some
        ready = [sequence for sequence in self._running if sequence.decoding]
        preemptions = 0
        for sequence in ready:
            while sequence.slot is not None and not self._grow(sequence):
                if len(self._running) == 1:
                    self._leave(sequence)
                    completions.append(self._cannot_fit(sequence, now))
                else:
                    self._preempt(max(self._running, key=lambda running: running.admission))
                    preemptions += 1
        survivors = [sequence for sequence in ready if sequence.slot is not None]
        return [self._chunk(sequence, 1) for sequence in survivors], preemptions

    def _prefilling(self) -> list[Sequence]:
        prompts = [sequence for sequence in self._running if not sequence.decoding]
        return sorted(prompts, key=lambda sequence: sequence.admission)

    def _chunk(self, sequence: Sequence, budget: int) -> Chunk:
        length = min(sequence.remaining, self.limits.chunk_size, budget)
        stop = sequence.computed + length
        samples = stop == len(sequence.tokens)
        return Chunk(sequence, sequence.computed, stop, samples, sequence.decoding)

    def _admit(self, now: float, completions: list[Completion]) -> Sequence | None:
        """Move the first waiting sequence into a slot; None if it has to wait."""
        while len(self._running) < self.limits.max_batch_size:
            queue = self._returning or self._fresh
            if not queue:
                return None
            sequence = queue[0]
            if self.blocks.needed(len(sequence.tokens)) > self.blocks.count:
                completions.append(self._cannot_fit(queue.popleft(), now))
                continue
            if not self._reserve(sequence):
                return None
            queue.popleft()
            self._enter(sequence, now)
            return sequence
        return None

    def _reserve(self, sequence: Sequence) -> bool:
        """Take the blocks for all known tokens, leaving one for each that already runs."""
        headroom = len(self._running)
        if self.blocks.free <= headroom:
            return False
        # the last token is never taken from the cache: its logits are needed
        shareable = (len(sequence.tokens) - 1) // self.blocks.block_size
        shared = self.blocks.match(self._chain(sequence, shareable))
        private = self.blocks.needed(len(sequence.tokens)) - len(shared)
        if self.blocks.free < private + headroom:
            self.blocks.release(shared)
            return False
        sequence.blocks = shared + self.blocks.allocate(private)
        sequence.computed = len(shared) * self.blocks.block_size
        return True

    def _grow(self, sequence: Sequence) -> bool:
        """Give a sequence the blocks for all its tokens if there are any."""
        missing = self.blocks.needed(len(sequence.tokens)) - len(sequence.blocks)
        if missing > self.blocks.free:
            return False
        sequence.blocks.extend(self.blocks.allocate(missing))
        return True

    def _advance(self, sequence: Sequence, computed: int) -> None:
        first = sequence.computed // self.blocks.block_size
        full = computed // self.blocks.block_size
        sequence.computed = computed
        if full > first:
            digests = self._chain(sequence, full)
            for index in range(first, len(digests)):
                self.blocks.publish(sequence.blocks[index], digests[index])

    def _chain(self, sequence: Sequence, block_count: int) -> list[bytes]:
        if not self.blocks.prefix_cache:
            return []
        return sequence.chain(block_count, self.blocks.block_size)

    def _enter(self, sequence: Sequence, now: float) -> None:
        sequence.slot = len(self._running)
        sequence.admission = self._admissions
        sequence.prefill_end = len(sequence.tokens)
        if sequence.started_at is None:
            sequence.started_at = now
        self._admissions += 1
        self._running.append(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Free the slot and the blocks; the last running sequence moves into the slot."""
        assert sequence.slot is not None
        last = self._running.pop()
        if last is not sequence:
            self._running[sequence.slot] = last
            last.slot = sequence.slot
        sequence.slot = None
        self.blocks.release(sequence.blocks)
        sequence.blocks = []

    def _preempt(self, sequence: Sequence) -> None:
        """Drop the computed part of a sequence; its tokens stay and are computed again."""
        self._leave(sequence)
        sequence.computed_before = max(sequence.computed_before, sequence.computed)
        sequence.computed = 0
        self._returning.appendleft(sequence)

    def _cannot_fit(self, sequence: Sequence, now: float) -> Completion:
        message = (
            f"{sequence.request.id} needs KV memory for {len(sequence.tokens):,} tokens,"
            f" capacity {self.blocks.capacity:,} tokens"
        )
        return _completion(sequence, now, error=RowError("cannot_fit", message))


def _completion(
    sequence: Sequence,
    now: float,
    *,
    ending: Ending | None = None,
    error: RowError | None = None,
) -> Completion:
    started = now if sequence.started_at is None else sequence.started_at
    first = now if sequence.first_token_at is None else sequence.first_token_at
    last = first if sequence.last_token_at is None else sequence.last_token_at
    return Completion(
        id=sequence.request.id,
        tokens=() if error else sequence.output.tolist(),
        finish_reason=ending.reason if ending else None,
        stop_string=ending.stop_string if ending else None,
        prompt_tokens=sequence.prompt_length,
        error=error,
        queue_s=started - sequence.arrived_at,
        prefill_s=first - started,
        decode_s=last - first,
        longest_gap_s=sequence.longest_gap_s,
        request=sequence.request,
        logprobs=() if error else tuple(sequence.logprobs),
        chunks=sequence.chunks,
    )
