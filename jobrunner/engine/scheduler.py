"""Decide which tokens are computed next. Knows nothing of tensors, files or text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from jobrunner.engine.admission import Admission, Need
from jobrunner.engine.batch_size import BatchSize
from jobrunner.engine.blocks import Blocks
from jobrunner.engine.holding import Found, Holding
from jobrunner.engine.plan import Chunk, Drawn, Plan
from jobrunner.engine.policies import Continuous, Door, Policy
from jobrunner.engine.preemption import Preemption, held_by
from jobrunner.engine.prefixes import Prefixes
from jobrunner.engine.running import Running
from jobrunner.engine.sequence import Sequence
from jobrunner.engine.stopping import Ending, OpenText, Stopping
from jobrunner.engine.waiting import Waiting
from jobrunner.records import Completion, Request, RowError

Numbers = np.ndarray
_STOPPED, _AT_LIMIT = Ending("stop"), Ending("length")


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
        self._prefixes = Prefixes()
        self._holding = Holding(blocks, self._preemption.host, self._prefixes)
        # of the step that is being planned, or of one that was withdrawn
        self._preempted: list[Sequence] = []
        self._cached = 0
        self._prefills: list[Chunk] = []
        self._running = Running(blocks.block_size)
        # finished, and in their slots until their batch ends
        self._staying: list[tuple[Sequence, Ending]] = []
        self._admissions = 0
        # those that say something to do
        self._plans = 0
        # plans that are launched and not committed
        self._in_flight = 0
        # how many run, by priority
        self._bands = Counter[int]()
        # those that run and draw by what they know of their tokens
        self._tied = 0
        # the latest plan was not computed, but what it decided holds
        self._withdrawn = False
        # somebody gives way as soon as all is committed
        self._must_settle = False
        # tokens of the last commit that came after the end of their text
        self.discarded = 0
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
    def _occupied(self) -> int:
        # whoever waits for a prefix has been let in
        return len(self._running) + len(self._staying) + len(self._prefixes)

    @property
    def waiting(self) -> int:
        return len(self._waiting) + len(self._prefixes)

    @property
    def busy(self) -> bool:
        """Whether anybody is not handed out: runs, waits, or keeps its place in a batch."""
        return bool(self._running or self.waiting or self._staying)

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
        self._keep()
        self.limits = limits

    def _keep(self) -> None:
        # a batch that stays together ends as large as it was formed
        formed = max(self._kept, self.limits.max_batch_size)
        self._kept = formed if self._policy.together else len(self._running)

    def take_back(self, plan: Plan, copied: int) -> None:
        """Take back the latest plan, which was not computed; `copied` of its copies are done.

        What it decided holds: who was let in, and who gave way. The next plan begins with the
        other copies.
        """
        assert plan.copies is self._holding.copies, "withdrew another plan than the latest"
        self._withdrawn = True
        del self._holding.copies[:copied]

    def lower(self, limits: Limits) -> int:
        """Change to limits that leave less room; return how many have to give way for it."""
        assert self._withdrawn, "lowered though the latest plan was computed"
        assert not self._in_flight, "lowered while a step is in flight"
        self._keep()
        count = len(self._running) - limits.token_budget
        for _ in range(count):
            self._preempt(self._preemption.choose(self._running.sequences, self.blocks))
        self.limits = limits
        return max(0, count)

    @property
    def may_plan_ahead(self) -> bool:
        """Whether a step can be planned while what the one before draws is not known.

        Not where a running sequence has penalties, which count the tokens; nor where one must give
        back its blocks, since it would have to be known what is in them.
        """
        if self._tied or self._must_settle:
            return False
        free = self.blocks.free
        if free >= len(self._running):
            return True
        return free >= len(self._running.short_of_blocks(self._running.ready()))

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

    def withdraw(self) -> list[Request]:
        """Take out those who wait and never ran; return their requests as they came.

        Whoever waits for a prefix has been let in, and stays.
        """
        fresh = [sequence for sequence in self._waiting if sequence.admission < 0]
        for sequence in fresh:
            self._waiting.remove(sequence)
        return [sequence.request for sequence in fresh]

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
        self._admission.next_step(self._running.lengths)
        if not self._withdrawn:
            self._holding.copies, self._preempted, self._cached = [], [], 0
        self._withdrawn = False
        self._prefills = []
        decoding = self._grow_decodes(now, completions)
        budget = self.limits.token_budget - decoding
        for sequence in self._running.prefilling:
            if budget == 0:
                break
            budget -= self._prefill(sequence, budget)
        self._fill(budget, now, completions, last_call)
        decodes = self._running.decodes(self._running.ready())
        self._plans += bool(len(decodes) or self._prefills or self._holding.copies)
        return Plan(
            decodes,
            self._prefills,
            completions,
            len(self._preempted),
            self._cached,
            self._holding.copies,
            self._padding(len(decodes)),
            self._plans,
        )

    def _padding(self, decoding: int) -> int:
        """Count who is computed for nothing; lowered limits may leave no room for all of them."""
        return min(len(self._staying), self.limits.token_budget - decoding) if decoding else 0

    def _fill(
        self, budget: int, now: float, completions: list[Completion], last_call: bool
    ) -> None:
        """Let in whoever may join, as long as there is budget."""
        self._waiting.expect_more(not last_call)
        self._slots = self._batch_size.next(
            most=self.limits.max_batch_size, waiting=len(self._waiting), occupied=self._occupied
        )
        # whoever was just preempted would take back the blocks it had to give
        short_of_blocks = bool(self._preempted)
        let_in = self._waiting.gone + self._policy.joining(self._door(now, last_call))
        while budget > 0 and not short_of_blocks:
            admitted = self._admit(now, completions, let_in)
            if admitted is None:
                break
            self._cached += admitted.cached
            if self._preempted:
                # the ready now are fewer by those who gave way
                budget = self._budget_left(without=admitted)
            budget -= 1 if admitted.decoding else self._prefill(admitted, budget)

    def _budget_left(self, *, without: Sequence) -> int:
        decoding = len(self._running.ready()) - without.decoding
        prefilled = sum(chunk.stop - chunk.start for chunk in self._prefills)
        return self.limits.token_budget - decoding - prefilled

    def _prefill(self, sequence: Sequence, budget: int) -> int:
        """Plan the next chunk of a prompt; return its tokens."""
        length = min(sequence.remaining, self.limits.chunk_size, budget)
        stop = sequence.computed + length
        samples = stop == sequence.length
        self._prefills.append(Chunk(sequence, sequence.computed, stop, samples))
        return length

    def launched(self, plan: Plan) -> None:
        """Take it as computed what a device has been given to compute, in the order of its work.

        What it draws is unknown until `commit`.
        """
        self._in_flight += 1
        self._running.expect(plan.decodes)
        drawn = len(plan.decodes)
        for chunk in plan.prefills:
            self._book_prefill(chunk)
            if chunk.samples:
                self._running.expect_one(chunk.sequence, drawn)
                drawn += 1

    def commit(self, plan: Plan, drawn: Drawn, now: float) -> list[Completion]:
        """Book a computed plan and the tokens that were drawn by it.

        A text may have ended while this plan was in flight: what it draws then is discarded.
        """
        if drawn.copy_s or drawn.compute_s:
            self._preemption.costs.observe(
                plan.swapped_blocks, drawn.copy_s, plan.prefill_tokens, drawn.compute_s
            )
        if not self._land():
            for chunk in plan.prefills:
                self._book_prefill(chunk)
        self._book_tokens(plan, drawn, now)
        completions: list[Completion] = []
        if self._staying and self._policy.ended(self._door(now, last_call=False)):
            completions += [self._finish(*finished, now) for finished in self._staying]
            self._staying.clear()
        return completions

    def _book_prefill(self, chunk: Chunk) -> None:
        sequence = chunk.sequence
        self._holding.advance(sequence, chunk.stop)
        sequence.chunks += 1
        if sequence.decoding:
            self._running.decode(sequence)

    def _book_tokens(self, plan: Plan, drawn: Drawn, now: float) -> None:
        prefilled = [chunk.sequence for chunk in plan.prefills if chunk.samples]
        slots = self._running.slots_of(plan.decodes)
        if prefilled:
            more = [-1 if each.slot is None else each.slot for each in prefilled]
            slots = np.concatenate([slots, np.array(more, np.int64)])
        tokens = np.asarray(drawn.tokens, np.int64)
        left = np.flatnonzero(slots >= 0)
        self.discarded = len(slots) - len(left)
        places, stopped = self._running.land(slots[left], tokens[left], now)
        if not places:
            return
        decodes = len(plan.decodes)
        for place, stops in zip(left[places].tolist(), stopped[places].tolist(), strict=True):
            decoded = place < decodes
            sequence = plan.decodes.sequences[place] if decoded else prefilled[place - decodes]
            token = int(tokens[place])
            if sequence.watched:
                logprob = drawn.logprobs[place] if drawn.logprobs else None
                sequence.note(token, logprob)
                ending = sequence.stopping.after(token)
            else:
                ending = _STOPPED if stops else _AT_LIMIT
            if ending is not None:
                self._end(sequence, ending)

    def _land(self) -> bool:
        """Take note that the launched step before all others is complete; False if there is none.

        It was the last to write into the blocks of those who ended with the step before it.
        """
        self.discarded = 0
        if not self._in_flight:
            return False
        self._in_flight -= 1
        self._holding.release_late()
        return True

    def _end(self, sequence: Sequence, ending: Ending) -> None:
        late = sequence.unknown > 0
        self._leave(sequence, late=late)
        self._admission.observe(sequence)
        self._staying.append((sequence, ending))

    def check(self) -> None:
        """Raise AssertionError unless slots, queues and blocks agree with each other."""
        assert len(self._running) <= self.limits.token_budget, "more running than tokens in a step"
        # whoever waits for a prefix may find its slot taken by one who came back
        occupied = len(self._running) + len(self._staying)
        most = max(self.limits.max_batch_size, self._kept)
        assert occupied <= most, "more in slots than there are"
        assert self._policy.together or not self._staying, "a finished sequence was kept"
        if self._staying and not (self._running or self.waiting):
            # those it waited for were withdrawn: it ends with the next step
            assert self._policy.ended(self._door(0.0, last_call=False)), "a batch does not end"
        for sequence, _ in self._staying:
            assert sequence.slot is None, "a finished sequence runs"
            assert not sequence.blocks, "a finished sequence holds blocks"
        self._waiting.check()
        assert self._in_flight or not self._holding.late, "nobody writes into late blocks"
        assert self._tied == sum(each.occurrences is not None for each in self._running), (
            "who is tied was miscounted"
        )
        self._running.check()
        assert self._bands == Counter(each.request.priority for each in self._running), (
            "the bands of those who run were miscounted"
        )
        for sequence in self._running:
            assert sequence.unknown <= self._in_flight, "a token stays unknown"
            assert sequence.remaining >= 1, "a running sequence has nothing to compute"
            assert not sequence.decoding or sequence.remaining == 1, "a decode fell behind"
        self._prefixes.check(self._running.sequences)
        waiting = [*self._waiting, *self._prefixes]
        for sequence in waiting:
            assert sequence.unknown == 0, "a waiting sequence has an unknown token"
            assert sequence.slot is None, "a waiting sequence has a slot"
        self._holding.check(self._running.sequences, waiting)

    def _grow_decodes(self, now: float, completions: list[Completion]) -> int:
        """Make room for the next token of each that decodes; return how many do.

        All of them fit the budget: a sequence is only admitted while the others leave some.
        """
        ready = self._running.ready()
        short = self._running.short_of_blocks(ready)
        if len(short) <= self.blocks.free:
            self._running.add_block(short, self.blocks.allocate(len(short)))
            return len(ready)
        sequences = self._running.sequences
        for sequence in [sequences[slot] for slot in short.tolist()]:
            while sequence.slot is not None and self.blocks.free == 0:
                if len(self._running) == 1:
                    self._leave(sequence)
                    completions.append(self._cannot_fit(sequence, now))
                else:
                    self._admission.preempted()
                    self._preempt(self._preemption.choose(sequences, self.blocks))
            if sequence.slot is not None:
                self._running.add_block(np.array([sequence.slot]), self.blocks.allocate(1))
        return len(self._running.ready())

    def _admit(self, now: float, completions: list[Completion], let_in: int) -> Sequence | None:
        """Move the first waiting sequence into a slot; None if it has to wait.

        New ones may join until `let_in` of them have left the queue.
        """
        while (sequence := self._next(now, let_in)) is not None:
            if self.blocks.needed(sequence.length) > self.blocks.count:
                self._take_out(sequence)
                self._holding.give_back_host(sequence)
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
        return self._slots_before(sequence) < self._slots

    def _slots_before(self, sequence: Sequence) -> int:
        """Count the slots of those who run, and of those who wait for a prefix and go first."""
        # the finished wait for the rest of their batch, which must not wait for their places
        running = len(self._running)
        if sequence.admission >= 0 or self._prefixes.is_ready(sequence):
            # let in before: there may be more of them than slots, if those have become fewer
            return running
        return running + self._prefixes.up_to(sequence.request.priority)

    def _make_room(self, candidate: Sequence) -> bool:
        """Preempt sequences of lower bands until a candidate has its slot and its blocks.

        Nobody goes where that would not do. A shortage that is only foreseen is no reason: when
        it comes, the lower bands are still there to give way.
        """
        # asked in every step in which somebody waits, so not each of those who run
        if max(self._bands, default=0) <= candidate.request.priority:
            return False
        lower = self._preemption.below(candidate, self._running.sequences)
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
        wanted = blocks.needed(candidate.length) + blocks.needed(len(self._running))
        slots = self._slots_before(candidate) - len(lower)
        return blocks.free + freed >= wanted and slots < self._slots

    def _take_out(self, sequence: Sequence) -> None:
        if self._prefixes.is_ready(sequence):
            self._prefixes.let_go(sequence)
        else:
            self._waiting.remove(sequence)

    def _hold(self, sequence: Sequence) -> bool:
        """Make a new sequence wait while a block of its prompt is being computed for another."""
        if sequence.admission >= 0 or not self._prefixes.busy:
            return False
        digests = self._holding.chain(sequence, self._holding.shareable(sequence))
        awaited = self._prefixes.awaited(digests)
        if awaited is None:
            return False
        self._take_out(sequence)
        self._prefixes.hold(sequence, awaited)
        return True

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
        if self.blocks.free == 0:
            return False
        found = self._holding.find(sequence)
        if not self._fits(sequence, found, ahead=ahead):
            self._holding.give_back(found)
            return False
        self._holding.take(sequence, found)
        self._admission.entered(sequence, found.shared)
        return True

    def _fits(self, sequence: Sequence, found: Found, *, ahead: bool) -> bool:
        blocks, running = self.blocks, len(self._running)
        need = Need(blocks.needed(sequence.length) - len(found.blocks), found.shared)
        if ahead:
            return self._admission.fits(sequence, need, running, blocks)
        # of those who run, so many need another block in a step
        return blocks.free >= need.private + blocks.needed(running)

    def _enter(self, sequence: Sequence, now: float) -> None:
        sequence.admission = self._admissions
        if sequence.remaining > 1 or not sequence.decoding:
            sequence.prefill_end = sequence.length
        if sequence.started_at is None:
            sequence.started_at = now
        self._admissions += 1
        self._tied += sequence.occurrences is not None
        self._running.enter(sequence)
        self._bands[sequence.request.priority] += 1
        if sequence.decoding:
            return
        known = sequence.computed // self.blocks.block_size
        digests = self._holding.chain(sequence, sequence.length // self.blocks.block_size)[known:]
        self._prefixes.begin(sequence, self.blocks.unknown(digests))

    def _leave(self, sequence: Sequence, *, late: bool = False) -> None:
        """Free the slot and the blocks; the last running sequence moves into the slot.

        `late`: the launched step still writes into the blocks.
        """
        assert sequence.slot is not None
        self._tied -= sequence.occurrences is not None
        self._prefixes.left(sequence)
        self._admission.left(sequence.slot)
        self._running.leave(sequence)
        self._bands[sequence.request.priority] -= 1
        if not self._bands[sequence.request.priority]:
            del self._bands[sequence.request.priority]
        self._holding.release(sequence.blocks, late=late)
        sequence.blocks = []

    def _preempt(self, sequence: Sequence) -> None:
        """Take its slot and blocks; what it computed goes to host memory or is computed again."""
        assert not self._in_flight, "preempted while a step is in flight"
        # what it computed is found again, by itself or by another, as long as it is not overwritten
        self._holding.publish(sequence, 0, sequence.computed // self.blocks.block_size)
        swapped = self._preemption.swaps(sequence, self.blocks)
        if swapped:
            self._holding.swap_out(sequence)
        self._leave(sequence)
        if not swapped:
            sequence.computed_before = max(sequence.computed_before, sequence.computed)
            sequence.computed = 0
        sequence.preemptions += 1
        self._preempted.append(sequence)
        self._prefills[:] = [each for each in self._prefills if each.sequence is not sequence]
        self._waiting.give_back(sequence, swapped=swapped)

    def _finish(self, sequence: Sequence, ending: Ending, now: float) -> Completion:
        if self._policy.together:
            # the caller has its text when the batch ends
            sequence.last_token_at = now
        return _completion(sequence, now, ending=ending)

    def _cannot_fit(self, sequence: Sequence, now: float) -> Completion:
        message = (
            f"{sequence.request.id} needs KV memory for {sequence.length:,} tokens,"
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
