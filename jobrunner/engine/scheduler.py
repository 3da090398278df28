"""Decide which tokens are computed next. Knows nothing of tensors, files or text."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import chain, repeat

from jobrunner.engine.admission import Admission, Need
from jobrunner.engine.batch_size import BatchSize
from jobrunner.engine.blocks import Blocks
from jobrunner.engine.policies import Continuous, Door, Policy
from jobrunner.engine.preemption import Preemption, held_by
from jobrunner.engine.prefixes import Prefixes
from jobrunner.engine.sequence import Sequence
from jobrunner.engine.stopping import Ending, OpenText, Stopping
from jobrunner.engine.swap import Copy
from jobrunner.engine.waiting import Waiting
from jobrunner.records import Completion, Request, RowError, TokenLogprob


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a step, in sequences and tokens, and of the waiting window, in rows.

    How many may run is decided every `schedule_every` steps.
    """

    max_batch_size: int
    token_budget: int
    chunk_size: int
    lookahead: int
    schedule_every: int = 1

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

    @property
    def follows(self) -> int | None:
        """Its token is not known: the one that the step launched before draws as its so-manieth.

        To be asked when the plan is launched. None where all tokens of the chunk are known.
        """
        sequence = self.sequence
        return sequence.drawn_at if self.stop > sequence.known else None


@dataclass(frozen=True, slots=True)
class Plan:
    """What one step computes: at most one chunk of a sequence, decodes first.

    `copies` between device and host memory are carried out before, in their order.
    """

    chunks: Seq[Chunk]
    completions: Seq[Completion]
    preemptions: int
    tokens_cached: int
    copies: Seq[Copy] = ()

    @property
    def swapped_blocks(self) -> int:
        return sum(len(copy.host_blocks) for copy in self.copies)

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
    wants any. `copy_s` went into the copies of the plan, `compute_s` into the rest; 0 is unknown.
    """

    tokens: Seq[int] = ()
    logprobs: Seq[TokenLogprob | None] = ()
    copy_s: float = 0.0
    compute_s: float = 0.0


class Scheduler:
    """Keeps waiting and running sequences and shares out slots, blocks and the token budget.

    `plan` and `commit` alternate; between them the caller computes what the plan says. Whoever
    computes beside us may call `launched` in between, and then plan once more before `commit`
    if we `may_plan_ahead`. Plans are launched and committed in their order. Times are seconds of
    any clock, passed in.
    """

    def __init__(
        self,
        blocks: Blocks,
        limits: Limits,
        open_text: OpenText,
        *,
        policy: Policy | None = None,
        waiting: Waiting | None = None,
        admission: Admission | None = None,
        preemption: Preemption | None = None,
    ) -> None:
        self.blocks = blocks
        self.limits = limits
        self._open_text = open_text
        self._policy = policy or Continuous()
        self._waiting = Waiting() if waiting is None else waiting
        self._admission = admission or Admission()
        self._preemption = preemption or Preemption()
        # of the step that is being planned
        self._copies: list[Copy] = []
        self._preempted: list[Sequence] = []
        self._chunks: list[Chunk] = []
        self._running: list[Sequence] = []
        # finished, and in their slots until their batch ends
        self._staying: list[tuple[Sequence, Ending]] = []
        self._admissions = 0
        # plans that are launched and not committed
        self._in_flight = 0
        # blocks of those who ended while the launched step still writes into them
        self._late_blocks: list[list[int]] = []
        # those that run and draw by what they know of their tokens
        self._tied = 0
        # somebody gives way as soon as all is committed
        self._must_settle = False
        # tokens of the last commit that came after the end of their text
        self.discarded = 0
        self._prefixes = Prefixes()
        self._batch_size = BatchSize(limits.schedule_every)
        # how many may run in this step
        self._slots = 0
        # how many ran when the limits changed: they may go on under lower ones
        self._kept = 0
        # rows of the window that wait elsewhere, for the answer of another
        self.outside = 0

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def staying(self) -> int:
        """Sequences that are finished and keep their place until their batch ends."""
        return len(self._staying)

    @property
    def _occupied(self) -> int:
        # whoever waits for a prefix has been let in
        return len(self._running) + len(self._staying) + len(self._prefixes)

    @property
    def waiting(self) -> int:
        return len(self._waiting) + len(self._prefixes)

    @property
    def room(self) -> int:
        """How many more requests the waiting window takes."""
        return max(0, self.limits.lookahead - self.waiting - self.outside)

    def retune(self, limits: Limits) -> None:
        """Change the limits from the next step on; whoever runs goes on running.

        Raises ValueError for a token budget that is below what runs.
        """
        if limits.token_budget < len(self._running):
            raise ValueError(
                f"token_budget is {limits.token_budget}, {len(self._running)} are running"
            )
        self.limits = limits
        self._kept = self._occupied

    @property
    def may_plan_ahead(self) -> bool:
        """Whether a step can be planned while what the one before draws is not known.

        Not where a running sequence has penalties, which count the tokens; nor where one must give
        back its blocks, since it would have to be known what is in them.
        """
        if self._tied or self._must_settle:
            return False
        free, size = self.blocks.free, self.blocks.block_size
        if free >= len(self._running):
            return True
        ready = self._ready()
        return free >= sum(len(each.tokens) > size * len(each.blocks) for each in ready)

    def opens_in_s(self, now: float) -> float:
        """After how long those who wait may join though nothing else happens."""
        return self._policy.opens_in_s(self._door(now, last_call=False))

    def add(self, request: Request, now: float) -> Completion | None:
        """Queue a request; one that is complete as it comes is returned as its completion."""
        # whoever had to wait outside has waited since it arrived
        arrived_at = min(now, request.arrival_s) if request.arrival_s else now
        sequence = Sequence(request, Stopping(request.sampling, self._open_text), arrived_at)
        if sequence.prompt_length == 0:
            error = RowError("empty_prompt", f"{request.id} has no token to start with")
            return _completion(sequence, now, error=error)
        count, ending = sequence.stopping.replay(request.output)
        if ending is not None:
            sequence.cut(count)
            return _completion(sequence, now, ending=ending)
        self._waiting.add(sequence)
        return None

    def unfinished(self) -> Iterator[Sequence]:
        """Every sequence that is not handed out: running, waiting, or keeping its place."""
        yield from self._running
        yield from (sequence for sequence, _ in self._staying)
        yield from self._prefixes
        yield from self._waiting

    def plan(self, now: float, *, last_call: bool = False) -> Plan:
        """Share out one token budget: decodes, then running prompts, then new sequences.

        `last_call` says that nothing more will be added.
        """
        assert self._in_flight <= 1, "planned more than one step ahead"
        completions: list[Completion] = []
        self._must_settle = False
        self._admission.next_step(self._running)
        self._copies, self._preempted, self._chunks = [], [], []
        chunks = self._chunks = self._decodes(now, completions)
        budget = self.limits.token_budget - len(chunks)
        for sequence in self._prefilling():
            if budget == 0:
                break
            chunks.append(self._chunk(sequence, budget))
            budget -= chunks[-1].stop - chunks[-1].start
        cached = 0
        self._slots = self._batch_size.next(
            most=self.limits.max_batch_size, waiting=len(self._waiting), occupied=self._occupied
        )
        # whoever was just preempted would take back the blocks it had to give
        let_in = self._waiting.gone + self._policy.joining(self._door(now, last_call))
        short_of_blocks = bool(self._preempted)
        while budget > 0 and not short_of_blocks:
            admitted = self._admit(now, completions, let_in)
            if admitted is None:
                break
            cached += admitted.cached
            if self._preempted:
                budget = self.limits.token_budget - sum(c.stop - c.start for c in chunks)
            chunk = self._chunk(admitted, budget)
            # decodes go first, those that were swapped out as well
            place = sum(each.decode for each in chunks) if chunk.decode else len(chunks)
            chunks.insert(place, chunk)
            budget -= chunk.stop - chunk.start
        return Plan(chunks, completions, len(self._preempted), cached, self._copies)

    def launched(self, plan: Plan) -> None:
        """Take it as computed what a device has been given to compute, in the order of its work.

        What it draws is unknown until `commit`.
        """
        self._in_flight += 1
        drawn = 0
        for chunk in plan.chunks:
            self._advance(chunk.sequence, chunk.stop)
            chunk.sequence.chunks += not chunk.decode
            if chunk.samples:
                chunk.sequence.expect(drawn)
                drawn += 1

    def commit(self, plan: Plan, drawn: Drawn, now: float) -> list[Completion]:
        """Book a computed plan and the tokens that were drawn by it.

        A text may have ended while this plan was in flight: what it draws then is discarded.
        """
        completions: list[Completion] = []
        if drawn.copy_s or drawn.compute_s:
            self._preemption.costs.observe(
                plan.swapped_blocks, drawn.copy_s, plan.prefill_tokens, drawn.compute_s
            )
        ahead = self._land()
        sampled = zip(drawn.tokens, drawn.logprobs or repeat(None), strict=False)
        for chunk in plan.chunks:
            sequence = chunk.sequence
            if not ahead:
                self._advance(sequence, chunk.stop)
                sequence.chunks += not chunk.decode
            if not chunk.samples:
                continue
            token, logprob = next(sampled)
            if sequence.slot is None:
                self.discarded += 1
                continue
            sequence.append(token, now, logprob)
            ending = sequence.stopping.after(token)
            if ending is not None:
                self._end(sequence, ending)
            elif ahead:
                self._publish_known(sequence)
        if self._staying and self._policy.ended(self._door(now, last_call=False)):
            completions += [self._finish(*finished, now) for finished in self._staying]
            self._staying.clear()
        return completions

    def _land(self) -> bool:
        """Take note that the launched step before all others is complete; False if there is none.

        It was the last to write into the blocks of those who ended with the step before it.
        """
        self.discarded = 0
        if not self._in_flight:
            return False
        self._in_flight -= 1
        for blocks in self._late_blocks:
            self.blocks.release(blocks)
        self._late_blocks.clear()
        return True

    def _end(self, sequence: Sequence, ending: Ending) -> None:
        late = sequence.unknown > 0
        sequence.forget_unknown()
        self._admission.observe(sequence)
        self._leave(sequence, late=late)
        self._staying.append((sequence, ending))

    def check(self) -> None:
        """Raise AssertionError unless slots, queues and blocks agree with each other."""
        self.blocks.check()
        assert len(self._running) <= self.limits.token_budget, "more running than tokens in a step"
        most = max(self.limits.max_batch_size, self._kept)
        assert self._occupied <= most, "more in slots than there are"
        assert self._policy.together or not self._staying, "a finished sequence was kept"
        assert self._running or self.waiting or not self._staying, "a batch does not end"
        for sequence, _ in self._staying:
            assert sequence.slot is None, "a finished sequence runs"
            assert not sequence.blocks, "a finished sequence holds blocks"
        self._waiting.check()
        assert self._in_flight or not self._late_blocks, "nobody writes into late blocks"
        assert self._tied == sum(each.occurrences is not None for each in self._running), (
            "who is tied was miscounted"
        )
        references = [0] * self.blocks.count
        for block in chain.from_iterable(self._late_blocks):
            references[block] += 1
        for slot, sequence in enumerate(self._running):
            assert sequence.slot == slot, "a sequence does not know its slot"
            assert sequence.unknown <= self._in_flight, "a token stays unknown"
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
        self._prefixes.check(self._running)
        for sequence in (*self._waiting, *self._prefixes):
            assert sequence.unknown == 0, "a waiting sequence has an unknown token"
            assert sequence.slot is None, "a waiting sequence has a slot"
            assert not sequence.blocks, "a waiting sequence holds blocks"
            kept = len(sequence.host_blocks)
            assert kept or sequence.computed == 0, "a waiting sequence has computed tokens"
            assert kept == self.blocks.needed(sequence.computed), "a swapped sequence lacks blocks"
        for sequence in self._running:
            assert not sequence.host_blocks, "a running sequence holds host memory"
        self._preemption.host.check([h for each in self._waiting for h in each.host_blocks])

    def _decodes(self, now: float, completions: list[Completion]) -> list[Chunk]:
        # all of them fit the budget: a sequence is only admitted while the others leave some
        ready = self._ready()
        for sequence in ready:
            while sequence.slot is not None and not self._grow(sequence):
                if len(self._running) == 1:
                    self._leave(sequence)
                    completions.append(self._cannot_fit(sequence, now))
                else:
                    self._admission.preempted()
                    self._preempt(self._preemption.choose(self._running, self.blocks))
        survivors = [sequence for sequence in ready if sequence.slot is not None]
        return [self._chunk(sequence, 1) for sequence in survivors]

    def _ready(self) -> list[Sequence]:
        """Those that decode; not those whose text ends with what is in flight, as is known."""
        ready = [sequence for sequence in self._running if sequence.decoding]
        if self._in_flight:
            return [sequence for sequence in ready if not sequence.at_limit]
        return ready

    def _prefilling(self) -> list[Sequence]:
        prompts = [sequence for sequence in self._running if not sequence.decoding]
        return sorted(prompts, key=lambda sequence: sequence.admission)

    def _chunk(self, sequence: Sequence, budget: int) -> Chunk:
        length = min(sequence.remaining, self.limits.chunk_size, budget)
        stop = sequence.computed + length
        samples = stop == len(sequence.tokens)
        return Chunk(sequence, sequence.computed, stop, samples, sequence.decoding)

    def _admit(self, now: float, completions: list[Completion], let_in: int) -> Sequence | None:
        """Move the first waiting sequence into a slot; None if it has to wait.

        New ones may join until `let_in` of them have left the queue.
        """
        while (sequence := self._next(now, let_in)) is not None:
            if self.blocks.needed(len(sequence.tokens)) > self.blocks.count:
                self._take_out(sequence)
                self._give_back_host(sequence)
                completions.append(self._cannot_fit(sequence, now))
                continue
            if sequence in self._preempted:
                # it would take back what it had to give
                return None
            has_slot = self._has_slot(sequence)
            if has_slot and self._hold(sequence):
                continue
            if not (has_slot and self._reserve(sequence)) and not self._make_room(sequence):
                return None
            self._take_out(sequence)
            self._enter(sequence, now)
            return sequence
        return None

    def _next(self, now: float, let_in: int) -> Sequence | None:
        """Return who is first of those that wait in the queue or waited for a prefix."""
        waiting, ready = self._waiting, self._prefixes.ready
        head = waiting.first(now, new=waiting.gone < let_in)
        if ready is not None and (head is None or _rank(ready) <= _rank(head)):
            return ready
        return head

    def _has_slot(self, sequence: Sequence) -> bool:
        return sequence is self._prefixes.ready or self._occupied < self._slots

    def _make_room(self, candidate: Sequence) -> bool:
        """Preempt sequences of lower bands until a candidate has its slot and its blocks.

        Nobody goes where that would not do. A shortage that is only foreseen is no reason: when
        it comes, the lower bands are still there to give way.
        """
        lower = self._preemption.below(candidate, self._running)
        if self._policy.together or not self._would_do(lower, candidate):
            return False
        if self._in_flight:
            self._must_settle = True
            return False
        while not (self._has_slot(candidate) and self._reserve(candidate, ahead=False)):
            victim = self._preemption.cheapest(lower, self.blocks)
            lower.remove(victim)
            self._preempt(victim)
        return True

    def _would_do(self, lower: Seq[Sequence], candidate: Sequence) -> bool:
        """Whether a candidate has its slot and its blocks when so many have gone."""
        if not lower:
            return False
        blocks = self.blocks
        freed = sum(held_by(sequence, blocks).private_blocks for sequence in lower)
        wanted = blocks.needed(len(candidate.tokens)) + blocks.needed(len(self._running))
        slots = self._slots + (candidate is self._prefixes.ready)
        return blocks.free + freed >= wanted and self._occupied - len(lower) < slots

    def _take_out(self, sequence: Sequence) -> None:
        if sequence is self._prefixes.ready:
            self._prefixes.let_go()
        else:
            self._waiting.remove(sequence)

    def _hold(self, sequence: Sequence) -> bool:
        """Make a new sequence wait while a block of its prompt is being computed for another."""
        if sequence.admission >= 0 or not self._prefixes.busy:
            return False
        digests = self._chain(sequence, self._shareable(sequence))
        awaited = self._prefixes.awaited(digests)
        if awaited is None:
            return False
        self._take_out(sequence)
        self._prefixes.hold(sequence, awaited)
        return True

    def _shareable(self, sequence: Sequence) -> int:
        # the last token is never taken from the cache: its logits are needed
        return (len(sequence.tokens) - 1) // self.blocks.block_size

    def _door(self, now: float, last_call: bool) -> Door:
        waiting = self._waiting
        return Door(
            slots=self.limits.max_batch_size,
            occupied=self._occupied,
            finished=len(self._staying),
            waiting=waiting.new,
            oldest_wait_s=waiting.oldest_wait_s(now),
            gone=waiting.gone,
            returning=waiting.returning,
            last_call=last_call,
            crowded=self.room == 0 or waiting.starving(now),
        )

    def _reserve(self, sequence: Sequence, *, ahead: bool = True) -> bool:
        """Take the blocks for all known tokens; fetch what was swapped out.

        `ahead`: they must do for what it and the others are expected to become, too.
        """
        blocks = self.blocks
        if blocks.free == 0:
            return False
        found = blocks.match(self._chain(sequence, self._shareable(sequence)))
        shared = sum(blocks.holders(block) > 1 for block in found)
        need = Need(blocks.needed(len(sequence.tokens)) - len(found), shared)
        if not self._fits(sequence, need, ahead=ahead):
            blocks.release(found)
            return False
        sequence.blocks = found + blocks.allocate(need.private)
        if sequence.host_blocks:
            self._swap_in(sequence, len(found))
        else:
            sequence.computed = sequence.cached = len(found) * blocks.block_size
        self._admission.entered(sequence, shared)
        return True

    def _fits(self, sequence: Sequence, need: Need, *, ahead: bool) -> bool:
        running = len(self._running)
        if ahead:
            return self._admission.fits(sequence, need, running, self.blocks)
        # of those who run, so many need another block in a step
        return self.blocks.free >= need.private + self.blocks.needed(running)

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
            # a block has no name before all of its tokens are known
            self._publish(sequence, first, min(full, sequence.known // self.blocks.block_size))

    def _publish_known(self, sequence: Sequence) -> None:
        """Publish the block that was computed before its last token was known."""
        known, size = sequence.known, self.blocks.block_size
        if known % size == 0 and known <= sequence.computed:
            self._publish(sequence, known // size - 1, known // size)

    def _publish(self, sequence: Sequence, first: int, stop: int) -> None:
        digests = self._chain(sequence, stop)
        for index in range(first, len(digests)):
            self.blocks.publish(sequence.blocks[index], digests[index])
            self._prefixes.done(digests[index])

    def _chain(self, sequence: Sequence, block_count: int) -> list[bytes]:
        if not self.blocks.prefix_cache:
            return []
        return sequence.chain(block_count, self.blocks.block_size)

    def _enter(self, sequence: Sequence, now: float) -> None:
        sequence.slot = len(self._running)
        sequence.admission = self._admissions
        if sequence.remaining > 1 or not sequence.decoding:
            sequence.prefill_end = len(sequence.tokens)
        if sequence.started_at is None:
            sequence.started_at = now
        self._admissions += 1
        self._tied += sequence.occurrences is not None
        self._running.append(sequence)
        if sequence.decoding:
            return
        known = sequence.computed // self.blocks.block_size
        digests = self._chain(sequence, len(sequence.tokens) // self.blocks.block_size)[known:]
        self._prefixes.begin(sequence, [each for each in digests if not self.blocks.knows(each)])

    def _leave(self, sequence: Sequence, *, late: bool = False) -> None:
        """Free the slot and the blocks; the last running sequence moves into the slot.

        `late`: the launched step still writes into the blocks.
        """
        assert sequence.slot is not None
        self._tied -= sequence.occurrences is not None
        self._prefixes.left(sequence)
        self._admission.left(sequence.slot)
        last = self._running.pop()
        if last is not sequence:
            self._running[sequence.slot] = last
            last.slot = sequence.slot
        sequence.slot = None
        if late:
            self._late_blocks.append(sequence.blocks)
        else:
            self.blocks.release(sequence.blocks)
        sequence.blocks = []

    def _preempt(self, sequence: Sequence) -> None:
        """Take its slot and blocks; what it computed goes to host memory or is computed again."""
        assert not self._in_flight, "preempted while a step is in flight"
        swapped = self._preemption.swaps(sequence, self.blocks)
        if swapped:
            self._swap_out(sequence)
        self._leave(sequence)
        if not swapped:
            sequence.computed_before = max(sequence.computed_before, sequence.computed)
            sequence.computed = 0
        sequence.preemptions += 1
        self._preempted.append(sequence)
        self._chunks[:] = [chunk for chunk in self._chunks if chunk.sequence is not sequence]
        self._waiting.give_back(sequence, swapped=swapped)

    def _swap_out(self, sequence: Sequence) -> None:
        count = self.blocks.needed(sequence.computed)
        sequence.host_blocks = self._preemption.host.take(count)
        self._copies.append(Copy(sequence.blocks[:count], sequence.host_blocks, out=True))

    def _swap_in(self, sequence: Sequence, found: int) -> None:
        """Copy back all computed blocks but those that the prefix cache still has."""
        host, size = sequence.host_blocks, self.blocks.block_size
        if found < len(host):
            self._copies.append(Copy(sequence.blocks[found : len(host)], host[found:], out=False))
        self._give_back_host(sequence)
        sequence.cached = 0
        computed = max(sequence.computed, found * size)
        sequence.computed = found * size
        self._advance(sequence, computed)

    def _give_back_host(self, sequence: Sequence) -> None:
        self._preemption.host.give_back(sequence.host_blocks)
        sequence.host_blocks = []

    def _finish(self, sequence: Sequence, ending: Ending, now: float) -> Completion:
        if self._policy.together:
            # the caller has its text when the batch ends
            sequence.last_token_at = now
        return _completion(sequence, now, ending=ending)

    def _cannot_fit(self, sequence: Sequence, now: float) -> Completion:
        message = (
            f"{sequence.request.id} needs KV memory for {len(sequence.tokens):,} tokens,"
            f" capacity {self.blocks.capacity:,} tokens"
        )
        return _completion(sequence, now, error=RowError("cannot_fit", message))


def _rank(sequence: Sequence) -> tuple[int, bool]:
    """Say who goes first: a lower band, and in it whoever ran before."""
    return sequence.request.priority, sequence.admission < 0


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
