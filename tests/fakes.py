"""Stand-ins for the slow parts of the engine and of what feeds it. Know no torch."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b

from jobrunner.engine.scheduler import Plan
from jobrunner.records import Request

OutputLength = Callable[[Sequence[int]], int]


class FakeRunner:
    """A model whose next token is a hash of the context, with a KV memory that can be wrong.

    It writes each chunk through the sequence's blocks and reads the whole context back through
    them, so a wrong block table or a block shared wrongly fails at once. The memory holds
    token ids where a real one holds keys and values.

    `vocabulary` are the ids it answers with. With `output_length`, a function of the prompt,
    the token at that place is `stop_id` and none before it is; without, `stop_id` comes as
    often as any other id. `before_step` is called before each step.
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

    def run(self, plan: Plan) -> list[int]:
        """Compute the chunks of a plan; return one token per sampling chunk."""
        if self._before_step is not None:
            self._before_step()
        self.steps += 1
        # as on a device: the whole batch is written before anything is read
        for chunk in plan.chunks:
            tokens = chunk.sequence.tokens[chunk.start : chunk.stop]
            self._write(chunk.sequence.blocks, chunk.start, tokens)
            self.tokens_computed += len(tokens)
        sampled = []
        for chunk in plan.chunks:
            sequence = chunk.sequence
            context = self._read(sequence.blocks, chunk.stop)
            assert context == sequence.tokens[: chunk.stop], "the KV memory holds other tokens"
            if chunk.samples:
                prompt = context[: sequence.prompt_length]
                sampled.append(self.next_token(prompt, context[sequence.prompt_length :]))
        return sampled

    def next_token(self, prompt: Sequence[int], output: Sequence[int]) -> int:
        """The token that follows: a function of the context alone."""
        digest = blake2b(array("q", [*prompt, *output]).tobytes(), digest_size=8).digest()
        number = int.from_bytes(digest, "little")
        if self._output_length is None:
            return self._vocabulary[number % len(self._vocabulary)]
        if len(output) + 1 >= self._output_length(prompt):
            return self._stop_id
        return self._speaking[number % len(self._speaking)]

    def alone(self, request: Request) -> list[int]:
        """The output a request must get, computed without any engine; ids and length only."""
        sampling = request.sampling
        output: list[int] = []
        while len(output) < sampling.max_new_tokens:
            output.append(self.next_token(request.prompt, output))
            if output[-1] in sampling.stop_ids:
                break
        return output

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
