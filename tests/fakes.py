"""Stand-ins for the slow parts of the engine and of what feeds it. Know no torch."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b

from jobrunner.engine.scheduler import Drawn, Plan
from jobrunner.records import Request, Sampling, TokenLogprob

GREEDY = Sampling(1)
OutputLength = Callable[[Sequence[int]], int]


class FakeRunner:
    """A model whose next token is a hash of the context, with a KV memory that can be wrong.

    It writes each chunk through the sequence's blocks and reads the whole context back through
    them, so a wrong block table or a block shared wrongly fails at once. The memory holds
    token ids where a real one holds keys and values.

    `vocabulary` are the ids it answers with. With `output_length`, a function of the prompt,
    the token at that place is `stop_id` and none before it is; without, `stop_id` comes as
    often as any other id. Of the sampling, `min_new_tokens` holds back the stop ids,
    `temperature` brings in the draw key, and `logprobs` are made up. `before_step` is called
    before each step.
    """

    def __init__(
        self,
        block_size: int,
        *,
        vocabulary: Sequence[int] = range(40),
        stop_id: int = 0,
        output_length: OutputLength | None = None,
        before_step: Callable[[], None] | None = None,
    ) -> None:
        self.block_size = block_size
        self.steps = 0
        self.tokens_computed = 0
        self._vocabulary = vocabulary
        self._speaking = [token for token in vocabulary if token != stop_id]
        self._stop_id = stop_id
        self._output_length = output_length
        self._before_step = before_step
        self._memory: dict[int, array[int]] = {}

    def run(self, plan: Plan) -> Drawn:
        """Compute the chunks of a plan; return one token per sampling chunk."""
        if self._before_step is not None:
            self._before_step()
        self.steps += 1
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
