"""One request on its way through the engine. Knows nothing of its neighbours or of tensors."""

from __future__ import annotations

from array import array

from jobrunner.engine.blocks import chain_digest
from jobrunner.engine.draws import Draw, is_plain, occurrences
from jobrunner.engine.stopping import Stopping
from jobrunner.records import Request, TokenLogprob


class Sequence:
    """Tokens known, tokens computed, and the blocks that hold the computed ones.

    `computed` catches up with `len(tokens)`: a prompt, a resumed text and one sampled token
    are the same thing to the engine, tokens that are not computed yet.
    """

    def __init__(self, request: Request, stopping: Stopping, arrived_at: float) -> None:
        self.request = request
        self.stopping = stopping
        self.tokens = array("q", request.prompt)
        self.prompt_length = len(self.tokens)
        self.tokens.extend(request.output)
        # those of the output, where they are wanted
        self.logprobs = _logprobs(request)
        # of its tokens, where penalties ask for them
        self.occurrences = occurrences(request.sampling, request.prompt, request.output)
        self._plain = is_plain(request.sampling)
        self.computed = 0
        # tokens known when it was admitted: computing those is prefill, the rest is decode
        self.prefill_end = len(self.tokens)
        # the most tokens ever computed: what lies below is recomputed after a preemption
        self.computed_before = 0
        # pieces that were prefilled, those after a preemption too
        self.chunks = 0
        self.blocks: list[int] = []
        self.digests: list[bytes] = []
        self.slot: int | None = None
        self.admission = -1
        self.arrived_at = arrived_at
        self.started_at: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.longest_gap_s = 0.0

    @property
    def remaining(self) -> int:
        """Tokens known and not computed."""
        return len(self.tokens) - self.computed

    @property
    def decoding(self) -> bool:
        return self.computed >= self.prefill_end

    @property
    def output(self) -> array[int]:
        """The tokens generated so far, those of an earlier run included."""
        return self.tokens[self.prompt_length :]

    @property
    def output_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def draw(self) -> Draw | None:
        """What decides the next token, beside its logits; None if nothing does."""
        if self._plain:
            return None
        return Draw(self.request.sampling, self.output_length, self.occurrences)

    def chain(self, block_count: int, block_size: int) -> list[bytes]:
        """The digests of the first blocks, each computed once in a sequence's life."""
        for index in range(len(self.digests), block_count):
            parent = self.digests[-1] if self.digests else b""
            block = self.tokens[index * block_size : (index + 1) * block_size]
            self.digests.append(chain_digest(parent, block))
        return self.digests[:block_count]

    def cut(self, output_length: int) -> None:
        """Drop what an earlier run generated past the end of the text."""
        del self.tokens[self.prompt_length + output_length :]
        del self.logprobs[output_length:]

    def append(self, token: int, now: float, logprob: TokenLogprob | None = None) -> None:
        """Add a sampled token and note when it came."""
        self.tokens.append(token)
        if self.occurrences is not None:
            self.occurrences.add(token)
        if logprob is not None:
            self.logprobs.append(logprob)
        if self.last_token_at is None:
            self.first_token_at = now
        else:
            self.longest_gap_s = max(self.longest_gap_s, now - self.last_token_at)
        self.last_token_at = now


def _logprobs(request: Request) -> list[TokenLogprob]:
    if request.sampling.logprobs is None:
        return []
    if len(request.logprobs) != len(request.output):
        raise ValueError(
            f"{request.id} comes with {len(request.output):,} tokens and"
            f" {len(request.logprobs):,} log-probabilities: one for each is needed"
        )
    return list(request.logprobs)
