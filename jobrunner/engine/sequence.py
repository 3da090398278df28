"""One request on its way through the engine. Knows nothing of its neighbours or of tensors."""

from __future__ import annotations

from array import array

from jobrunner.engine.blocks import chain_digest
from jobrunner.engine.draws import Draw, is_plain, occurrences
from jobrunner.engine.stopping import Stopping
from jobrunner.records import Request, Sampling, TokenLogprob

# multiples of these fall evenly between two whole numbers, however many there are
_GOLDEN = (5**0.5 - 1) / 2
_SILVER = 2**0.5 - 1
# no token has this id
_UNKNOWN = -1


class Sequence:
    """Tokens known, tokens computed, and the blocks that hold the computed ones.

    `computed` catches up with `len(tokens)`: a prompt, a resumed text and one sampled token
    are the same thing to the engine, tokens that are not computed yet. The last of them may be
    `unknown`: a device draws them, or has drawn them, and nobody has read them back.
    """

    def __init__(self, request: Request, stopping: Stopping, arrived_at: float) -> None:
        self.request = request
        self.stopping = stopping
        self.tokens = array("q", request.prompt)
        self.prompt_length = len(self.tokens)
        self.tokens.extend(request.output)
        self.unknown = 0
        # of those that the launched step draws, the first is 0: the one that is its own
        self.drawn_at = -1
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
        # in host memory, one for each block that held computed tokens when it was swapped out
        self.host_blocks: list[int] = []
        self.preemptions = 0
        # tokens found in the prefix cache when it was last admitted, nothing if it was swapped out
        self.cached = 0
        self.length_bounds = length_bounds(request.sampling)
        # where it stands among all rows if nothing else is known, evenly spread over 0 to 1
        self.place = (request.id.index * _GOLDEN + request.sample * _SILVER) % 1.0
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
    def known(self) -> int:
        """How many of the tokens are known."""
        return len(self.tokens) - self.unknown

    @property
    def output(self) -> array[int]:
        """The known tokens generated so far, those of an earlier run included."""
        return self.tokens[self.prompt_length : self.known]

    @property
    def output_length(self) -> int:
        """Tokens generated so far, the unknown ones included."""
        return len(self.tokens) - self.prompt_length

    @property
    def at_limit(self) -> bool:
        """Whether its text ends with the last token, whatever that turns out to be."""
        return self.output_length >= self.request.sampling.max_new_tokens

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

    def expect(self, drawn_at: int) -> None:
        """Keep a place for the token that the launched step draws as its `drawn_at`-th."""
        self.tokens.append(_UNKNOWN)
        self.unknown += 1
        self.drawn_at = drawn_at

    def forget_unknown(self) -> None:
        """Drop the places of tokens that nobody will read: the text has ended before them."""
        del self.tokens[self.known :]
        self.unknown = 0

    def append(self, token: int, now: float, logprob: TokenLogprob | None = None) -> None:
        """Add a sampled token, in its place if one was kept, and note when it came."""
        if self.unknown:
            self.tokens[-self.unknown] = token
            self.unknown -= 1
        else:
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


def length_bounds(sampling: Sampling) -> tuple[int, int]:
    """The least and the most output tokens that the sampling allows."""
    most = sampling.max_new_tokens
    ends_early = sampling.stop_ids or sampling.stop or sampling.stop_on_repetition
    return (min(sampling.min_new_tokens, most) if ends_early else most), most


def _logprobs(request: Request) -> list[TokenLogprob]:
    if request.sampling.logprobs is None:
        return []
    if len(request.logprobs) != len(request.output):
        raise ValueError(
            f"{request.id} comes with {len(request.output):,} tokens and"
            f" {len(request.logprobs):,} log-probabilities: one for each is needed"
        )
    return list(request.logprobs)
