"""One request on its way through the engine. Knows nothing of its neighbours or of tensors."""

from __future__ import annotations

from array import array
from typing import Protocol

from jobrunner.engine.blocks import chain_digest
from jobrunner.engine.draws import Draw, is_plain, occurrences
from jobrunner.engine.stopping import Stopping
from jobrunner.records import Request, Sampling, TokenLogprob

# multiples of these fall evenly between two whole numbers, however many there are
_GOLDEN = (5**0.5 - 1) / 2
_SILVER = 2**0.5 - 1
# whoever has more is watched for them
_MOST_STOP_IDS = 8


class Slots(Protocol):
    """Where what changes with every token of a sequence stands while it decodes."""

    def bring(self, sequence: Sequence) -> None:
        """Hand the newest tokens to `Sequence.extend`."""

    def known(self, slot: int) -> int:
        """How many of its tokens are known."""

    def unknown(self, slot: int) -> int:
        """How many more a device draws, or has drawn, and nobody has read back."""


class Sequence:
    """Tokens known, tokens computed, and the blocks that hold the computed ones.

    `computed` catches up with `length`: a prompt, a resumed text and one sampled token are the
    same thing to the engine, tokens that are not computed yet. While it decodes it is one behind,
    and the count of tokens, the newest of them and their times are kept in its slot.
    """

    def __init__(self, request: Request, stopping: Stopping, arrived_at: float) -> None:
        self.request = request
        self.stopping = stopping
        self._tokens = array("q", request.prompt)
        self.prompt_length = len(self._tokens)
        self._tokens.extend(request.output)
        # while it decodes
        self._slots: Slots | None = None
        # those of the output, where they are wanted
        self.logprobs = _logprobs(request)
        # of its tokens, where penalties ask for them
        self.occurrences = occurrences(request.sampling, request.prompt, request.output)
        # whether its next token depends on more than its logits
        self.ruled = not is_plain(request.sampling)
        # whether something has to be done for each of its tokens
        self.watched = self.occurrences is not None or _is_watched(request.sampling)
        self._computed = 0
        # tokens known when it was admitted: computing those is prefill, the rest is decode
        self.prefill_end = len(self._tokens)
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
        # up to when it began to decode; brought up to date when it leaves its slot
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.longest_gap_s = 0.0

    @property
    def tokens(self) -> array[int]:
        """The known tokens, not to be changed."""
        if self._slots is not None:
            self._slots.bring(self)
        return self._tokens

    @property
    def known(self) -> int:
        """How many tokens are known."""
        if self._slots is None or self.slot is None:
            return len(self._tokens)
        return self._slots.known(self.slot)

    @property
    def unknown(self) -> int:
        """How many more a device draws, or has drawn, and nobody has read back."""
        if self._slots is None or self.slot is None:
            return 0
        return self._slots.unknown(self.slot)

    @property
    def length(self) -> int:
        """How many tokens there are, the unknown ones included."""
        return self.known + self.unknown

    @property
    def computed(self) -> int:
        """Tokens whose KV is in the blocks, or in host memory, or on its way there."""
        return self._computed if self._slots is None else self.length - 1

    @computed.setter
    def computed(self, count: int) -> None:
        assert self._slots is None, "who decodes computes a token a step"
        self._computed = count

    @property
    def remaining(self) -> int:
        """Tokens that are not computed."""
        return self.length - self.computed

    @property
    def decoding(self) -> bool:
        return self._slots is not None or self._computed >= self.prefill_end

    @property
    def output(self) -> array[int]:
        """The known tokens generated so far, those of an earlier run included."""
        return self.tokens[self.prompt_length :]

    @property
    def output_length(self) -> int:
        """Tokens generated so far, the unknown ones included."""
        return self.length - self.prompt_length

    @property
    def draw(self) -> Draw | None:
        """What decides the next token, beside its logits; None if nothing does."""
        if not self.ruled:
            return None
        return Draw(self.request.sampling, self.output_length, self.occurrences)

    def chain(self, block_count: int, block_size: int) -> list[bytes]:
        """The digests of the first blocks, each computed once in a sequence's life."""
        digests = self.digests
        if len(digests) < block_count:
            first, parent = len(digests) * block_size, digests[-1] if digests else b""
            tokens = memoryview(self.tokens[first : block_count * block_size])
            for start in range(0, len(tokens), block_size):
                parent = chain_digest(parent, tokens[start : start + block_size])
                digests.append(parent)
        return digests[:block_count]

    def cut(self, output_length: int) -> None:
        """Drop what an earlier run generated past the end of the text."""
        del self._tokens[self.prompt_length + output_length :]
        del self.logprobs[output_length:]

    def decode_in(self, slots: Slots) -> None:
        """Leave it to the slots to keep what changes with every token."""
        self._slots = slots

    def leave_slot(self) -> None:
        """Keep that itself again; tokens that nobody has read are dropped."""
        if self._slots is not None:
            self._slots = None
            self._computed = len(self._tokens) - 1
        self.slot = None

    def extend(self, tokens: bytes) -> None:
        """Take over known tokens, 64-bit integers, from the slots."""
        self._tokens.frombytes(tokens)

    def note(self, token: int, logprob: TokenLogprob | None) -> None:
        """Take note of a token of the text, beside what the slots keep."""
        if self.occurrences is not None:
            self.occurrences.add(token)
        if logprob is not None:
            self.logprobs.append(logprob)


def _is_watched(sampling: Sampling) -> bool:
    asks = sampling.stop or sampling.stop_on_repetition or sampling.logprobs is not None
    return bool(asks) or len(sampling.stop_ids) > _MOST_STOP_IDS


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
