"""What a step computes, and what came of it. Knows nothing of queues, tensors or text."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from jobrunner.engine.draws import Draw
from jobrunner.engine.sequence import Sequence
from jobrunner.engine.swap import Copy
from jobrunner.errors import InfrastructureError
from jobrunner.records import Completion, TokenLogprob

Numbers = np.ndarray

_NONE = np.zeros(0, np.int64)
_NOBODY = np.zeros(0, object)
_NO_TABLE = np.zeros((0, 1), np.int32)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start` up to, not including, `stop` of a sequence.

    `samples` says that the logits of its last token give the next one. `follows`: its token is
    not known, it is the one that the step launched before draws as its so-manieth.
    """

    sequence: Sequence
    start: int
    stop: int
    samples: bool
    decode: bool = False
    follows: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Decodes:
    """The next token of each of N sequences, in arrays: all are `[N]` but `table`.

    A token stands at position `starts`; it is `tokens`, or, where `follows` is not negative, the
    one that the step launched before draws as its so-manieth. Row `slots` of `table`, `[rows,
    blocks]`, lists the blocks of its sequence; it is to be read before the next plan. `rows` are
    the places of the sequences' rows in their shards, `ruled` says whose draw has rules. `entries`
    are what their slots are known by, so that those are found who have moved since.
    """

    sequences: Numbers = field(default_factory=lambda: _NOBODY)
    slots: Numbers = field(default_factory=lambda: _NONE)
    starts: Numbers = field(default_factory=lambda: _NONE)
    tokens: Numbers = field(default_factory=lambda: _NONE)
    follows: Numbers = field(default_factory=lambda: _NONE)
    rows: Numbers = field(default_factory=lambda: _NONE)
    ruled: Numbers = field(default_factory=lambda: _NONE)
    table: Numbers = field(default_factory=lambda: _NO_TABLE)
    entries: Numbers = field(default_factory=lambda: _NONE)

    def __len__(self) -> int:
        return len(self.slots)

    def chunks(self) -> list[Chunk]:
        """Each as a chunk of one token."""
        return [
            Chunk(sequence, start, start + 1, True, True, None if follows < 0 else follows)
            for sequence, start, follows in zip(
                self.sequences, self.starts.tolist(), self.follows.tolist(), strict=True
            )
        ]


@dataclass(frozen=True, slots=True)
class Plan:
    """What one step computes: at most one chunk of a sequence, decodes first.

    `copies` between device and host memory are carried out before, in their order. `padding` more
    single tokens are computed for nothing, for the finished rows of a batch that keep their place.
    `number` counts the plans of a scheduler that say something to do, from 1.
    """

    decodes: Decodes = field(default_factory=Decodes)
    prefills: Seq[Chunk] = ()
    completions: Seq[Completion] = ()
    preemptions: int = 0
    tokens_cached: int = 0
    copies: Seq[Copy] = ()
    padding: int = 0
    number: int = 0

    def __len__(self) -> int:
        """How many sequences it computes something of."""
        return len(self.decodes) + len(self.prefills)

    @property
    def chunks(self) -> list[Chunk]:
        """All of it, one by one."""
        return [*self.decodes.chunks(), *self.prefills]

    def sampling(self) -> list[Sequence]:
        """The sequences that get a token, in the order of the plan."""
        return [*self.decodes.sequences, *(each.sequence for each in self.prefills if each.samples)]

    def draws(self) -> list[Draw | None]:
        """What decides the token of each of `sampling`, beside its logits; None if nothing does."""
        decodes = self.decodes
        draws: list[Draw | None] = [None] * len(decodes)
        for place in np.flatnonzero(decodes.ruled).tolist():
            draws[place] = decodes.sequences[place].draw
        return draws + [each.sequence.draw for each in self.prefills if each.samples]

    @property
    def tokens(self) -> int:
        """All tokens that it computes, for nothing or not."""
        return self.decode_tokens + self.prefill_tokens + self.padding

    @property
    def swapped_blocks(self) -> int:
        return sum(len(copy.host_blocks) for copy in self.copies)

    @property
    def prefill_tokens(self) -> int:
        return sum(chunk.stop - chunk.start for chunk in self.prefills)

    @property
    def decode_tokens(self) -> int:
        return len(self.decodes)

    @property
    def context_tokens(self) -> int:
        """Tokens that its sequences already have in KV memory."""
        return int(self.decodes.starts.sum()) + sum(chunk.start for chunk in self.prefills)

    @property
    def attended_tokens(self) -> int:
        """Sum over the prompt tokens of it how many tokens each of them attends to."""
        return sum(
            (chunk.stop * (chunk.stop + 1) - chunk.start * (chunk.start + 1)) // 2
            for chunk in self.prefills
        )

    @property
    def tokens_recomputed(self) -> int:
        # what a decode computes is new: only a prefill goes over what was lost
        return sum(
            max(0, min(chunk.stop, chunk.sequence.computed_before) - chunk.start)
            for chunk in self.prefills
        )


@dataclass(frozen=True, slots=True)
class Drawn:
    """What came of a plan: one token per sampling chunk, in the order of the plan.

    `logprobs` runs beside the tokens, None for a row that wants none; it is empty where no row
    wants any. `copy_s` went into the copies of the plan, `compute_s` into the rest. Where a device
    copies beside its computing, that was held up for `held_s` by these copies or earlier ones.
    0 is unknown.
    """

    tokens: Seq[int] | Numbers = ()
    logprobs: Seq[TokenLogprob | None] = ()
    copy_s: float = 0.0
    held_s: float = 0.0
    compute_s: float = 0.0


class OutOfMemoryError(InfrastructureError):
    """A device has no memory for a plan. Of its copies so many are carried out, of the rest nothing
    counts: what was written of its tokens is to be written again.

    `on_host`: it is this machine that has none.
    """

    def __init__(self, message: str, *, copied: int = 0, on_host: bool = False) -> None:
        super().__init__(
            f"the device is out of memory: {message}",
            hint="let nobody else use the device, or lower batching.kv_memory",
        )
        self.copied = copied
        self.on_host = on_host
