"""Stand-ins for the slow parts of the engine and of what feeds it. Know no torch."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from jobrunner.engine.blocks import Blocks
from jobrunner.engine.plan import Chunk, Drawn, Plan
from jobrunner.engine.swap import Copy
from jobrunner.records import Request, Sampling, TokenLogprob

GREEDY = Sampling(1)
OutputLength = Callable[[Sequence[int]], int]


class FakeRunner:
    """A model whose next token is a hash of the context, with a KV memory that can be wrong.

    It writes each chunk through the sequence's blocks and reads the whole context back through
    them, so a wrong block table or a block shared wrongly fails at once. The memory holds
    token ids where a real one holds keys and values, and so does its host memory.

    `vocabulary` are the ids it answers with. With `output_length`, a function of the prompt,
    the token at that place is `stop_id` and none before it is; without, `stop_id` comes as
    often as any other id. Of the sampling, `min_new_tokens` holds back the stop ids,
    `temperature` brings in the draw key, and `logprobs` are made up. `before_step` is called
    before each step, `before_plan` with what it will compute.
    """

    def __init__(
        self,
        block_size: int,
        *,
        vocabulary: Sequence[int] = range(40),
        stop_id: int = 0,
        output_length: OutputLength | None = None,
        before_step: Callable[[], None] | None = None,
        before_plan: Callable[[Plan], None] | None = None,
    ) -> None:
        self.block_size = block_size
        self.steps = 0
        self.tokens_computed = 0
        self._vocabulary = vocabulary
        self._speaking = [token for token in vocabulary if token != stop_id]
        self._stop_id = stop_id
        self._output_length = output_length
        self._before_step = before_step
        self._before_plan = before_plan
        self._memory: dict[int, array[int]] = {}
        self._host_memory: dict[int, array[int]] = {}

    def run(self, plan: Plan) -> Drawn:
        """Compute the chunks of a plan; return one token per sampling chunk."""
        if self._before_step is not None:
            self._before_step()
        if self._before_plan is not None:
            self._before_plan(plan)
        self.steps += 1
        for copy in plan.copies:
            self._copy(copy)
        # as on a device: the whole batch is written before anything is read
        for chunk in plan.chunks:
            tokens = chunk.sequence.tokens[chunk.start : chunk.stop]
            self._write(chunk.sequence.blocks, chunk.start, tokens)
            self.tokens_computed += len(tokens)
        sampled: list[int] = []
        logprobs: list[TokenLogprob | None] = []
        for chunk in plan.chunks:
            sequence = chunk.sequence
            context = self._read(sequence.blocks, chunk.stop)
            assert context == sequence.tokens[: chunk.stop], "the KV memory holds other tokens"
            if chunk.samples:
                length = sequence.prompt_length
                state = context[:length], context[length:], sequence.request.sampling
                sampled.append(self.next_token(*state))
                logprobs.append(self.logprob(*state))
        return Drawn(sampled, logprobs if any(logprobs) else ())

    def next_token(
        self, prompt: Sequence[int], output: Sequence[int], sampling: Sampling = GREEDY
    ) -> int:
        """The token that follows: a function of the context and the sampling alone."""
        early = len(output) < sampling.min_new_tokens
        held_back = sampling.stop_ids if early else frozenset[int]()
        choices = self._vocabulary
        if self._output_length is not None:
            if len(output) + 1 >= self._output_length(prompt) and self._stop_id not in held_back:
                return self._stop_id
            choices = self._speaking
        if held_back:
            choices = [token for token in choices if token not in held_back]
        return choices[self._number(prompt, output, sampling) % len(choices)]

    def logprob(
        self, prompt: Sequence[int], output: Sequence[int], sampling: Sampling
    ) -> TokenLogprob | None:
        """What it says of the token that follows, if wanted; the last of several has no chance."""
        if sampling.logprobs is None:
            return None
        token = self.next_token(prompt, output, sampling)
        logprob = -(self._number(prompt, output, sampling) % 100 + 1) / 64
        likeliest = [token, *(other for other in self._vocabulary if other != token)]
        likeliest = likeliest[: sampling.logprobs]
        top = [(other, logprob * (place + 1)) for place, other in enumerate(likeliest)]
        if len(top) > 1:
            top[-1] = (likeliest[-1], -math.inf)
        return TokenLogprob(token, logprob, tuple(top))

    def alone(self, request: Request) -> list[int]:
        """The output a request must get, computed without any engine; ids and lengths only."""
        sampling = request.sampling
        output: list[int] = []
        while len(output) < sampling.max_new_tokens:
            output.append(self.next_token(request.prompt, output, sampling))
            if output[-1] in sampling.stop_ids and len(output) > sampling.min_new_tokens:
                break
        return output

    def alone_logprobs(self, request: Request) -> list[TokenLogprob]:
        """The log-probabilities that go with the output of `alone`."""
        output = self.alone(request)
        found = [
            self.logprob(request.prompt, output[:length], request.sampling)
            for length in range(len(output))
        ]
        return [logprob for logprob in found if logprob is not None]

    def _number(self, prompt: Sequence[int], output: Sequence[int], sampling: Sampling) -> int:
        key = sampling.draw_key if sampling.temperature else b""
        context = array("q", [*prompt, *output]).tobytes()
        return int.from_bytes(blake2b(context + key, digest_size=8).digest(), "little")

    def _copy(self, copy: Copy) -> None:
        for block, place in zip(copy.device_blocks, copy.host_blocks, strict=True):
            if copy.out:
                self._host_memory[place] = self._memory[block][:]
            else:
                # what is copied back is never read again
                self._memory[block] = self._host_memory.pop(place)

    def _write(self, blocks: Sequence[int], start: int, tokens: Sequence[int]) -> None:
        for position, token in enumerate(tokens, start):
            block, offset = divmod(position, self.block_size)
            cells = self._memory.setdefault(blocks[block], array("q", [-1] * self.block_size))
            cells[offset] = token

    def _read(self, blocks: Sequence[int], stop: int) -> array[int]:
        context = array("q")
        for block in blocks[: -(-stop // self.block_size)]:
            context.extend(self._memory[block])
        return context[:stop]


@dataclass(frozen=True)
class Work:
    """A chunk as a device is given it: a copy of its block table, and no token that is unknown."""

    chunk: Chunk
    tokens: array[int]
    follows: int | None
    blocks: tuple[int, ...]

    def written(self, block_size: int) -> set[int]:
        first, last = self.chunk.start // block_size, (self.chunk.stop - 1) // block_size
        return set(self.blocks[first : last + 1])


@dataclass(frozen=True, eq=False)
class Launch:
    """A plan that a fake device was given, and when it will be done with it."""

    device: FakeDevice
    copies: Sequence[Copy]
    works: Sequence[Work]
    done_at: float

    def collect(self) -> Drawn:
        return self.device.collect(self)


class FakeDevice(FakeRunner):
    """A `FakeRunner` that computes beside the host, each step in `step_s` of a `StillClock`.

    It computes a plan no earlier than it is collected, when the host has gone on as far as it
    can, and then looks whether the blocks that it writes are still those of their sequences.
    `ahead` off makes it a plain runner that takes as long.
    """

    def __init__(
        self,
        blocks: Blocks,
        clock: StillClock,
        *,
        ahead: bool = True,
        step_s: float = 0.0,
        tells_time: bool = True,
        **more: Any,
    ) -> None:
        super().__init__(blocks.block_size, **more)
        self.ahead = ahead
        self.events: list[str] = []
        self.late_tokens = 0
        self._blocks = blocks
        self._clock = clock
        self._step_s = step_s
        self._told_s = step_s if tells_time else 0.0
        self._free_at = 0.0
        self._queue: deque[Launch] = deque()
        self._drawn: list[int] = []

    def run(self, plan: Plan) -> Drawn:
        self._clock.now += self._step_s
        return super().run(plan)

    def launch(self, plan: Plan) -> Launch:
        self._free_at = max(self._free_at, self._clock.now) + self._step_s
        works = [_work(chunk) for chunk in plan.chunks]
        launch = Launch(self, list(plan.copies), works, self._free_at)
        self._queue.append(launch)
        self.events.append("launch")
        return launch

    def collect(self, launch: Launch) -> Drawn:
        self.events.append("collect")
        assert launch is self._queue.popleft(), "collected out of order"
        self._clock.now = max(self._clock.now, launch.done_at)
        self.steps += 1
        for copy in launch.copies:
            self._copy(copy)
        for work in launch.works:
            self._check_owner(work)
            known = work.tokens if work.follows is None else [self._drawn[work.follows]]
            self._write(work.blocks, work.chunk.start, known)
            self.tokens_computed += len(known)
        drawn = [self._draw(work) for work in launch.works if work.chunk.samples]
        self._drawn = [token for token, _ in drawn]
        logprobs = [logprob for _, logprob in drawn]
        return Drawn(self._drawn, logprobs if any(logprobs) else (), compute_s=self._told_s)

    def _draw(self, work: Work) -> tuple[int, TokenLogprob | None]:
        sequence, context = work.chunk.sequence, self._read(work.blocks, work.chunk.stop)
        length = sequence.prompt_length
        state = context[:length], context[length:], sequence.request.sampling
        return self.next_token(*state), self.logprob(*state)

    def _check_owner(self, work: Work) -> None:
        written = work.written(self.block_size)
        if work.chunk.sequence.slot is not None:
            assert written <= set(work.chunk.sequence.blocks), "wrote into blocks of another"
            return
        # its text has ended with the step before
        self.late_tokens += 1
        assert all(self._blocks.holders(block) == 1 for block in written), "wrote into free blocks"
        for other in self._later(work):
            assert not written & set(other.blocks), "wrote into blocks that were given away"

    def _later(self, work: Work) -> Iterator[Work]:
        for launch in self._queue:
            yield from (
                each for each in launch.works if each.chunk.sequence is not work.chunk.sequence
            )


def _work(chunk: Chunk) -> Work:
    sequence, follows = chunk.sequence, chunk.follows
    tokens = sequence.tokens[chunk.start : chunk.stop]
    known = 0 if follows is not None else chunk.stop - chunk.start
    assert len(tokens) == known, "a token is not known"
    assert follows is None or chunk.decode, "a piece of a prompt is not known"
    return Work(chunk, tokens, follows, tuple(sequence.blocks))


class FakeRequests:
    """A source of requests; `arrivals` says how many more are ready at each call of `take`.

    When `arrivals` ends, all the rest is ready.
    """

    def __init__(self, requests: Iterable[Request], arrivals: Iterable[int] = ()) -> None:
        self._requests = list(requests)
        self._arrivals = iter(arrivals)
        self._ready = 0
        self.waits = 0

    @property
    def exhausted(self) -> bool:
        return not self._requests

    def take(self, limit: int) -> list[Request]:
        self._ready += next(self._arrivals, len(self._requests))
        count = min(limit, self._ready, len(self._requests))
        taken, self._requests = self._requests[:count], self._requests[count:]
        self._ready -= count
        return taken

    def wait(self, timeout_s: float) -> None:
        self.waits += 1
        assert self.waits < 10_000, "nothing goes on"


class LetterText:
    """A text stream in which each token is a fixed string."""

    def __init__(self, spelling: Callable[[int], str]) -> None:
        self._spelling = spelling

    def step(self, token: int) -> str:
        return self._spelling(token)


class FakeClock:
    """A clock that moves one second at each look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


class StillClock:
    """A clock that only others move."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now
