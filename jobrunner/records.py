"""The frozen types that cross folders. Know nothing of files, tensors or text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

ErrorKind = Literal[
    "null_prompt",
    "empty_prompt",
    "bad_type",
    "bad_text",
    "template_error",
    "prompt_too_long",
    "cannot_fit",
]
FinishReason = Literal["stop", "length"]


class RowId(NamedTuple):
    """Identity of a row: where it stands in the input, never what it says."""

    shard: str
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here


class Span(NamedTuple):
    """Rows `start` up to, not including, `stop` of one shard: what a worker claims."""

    shard: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class RowError:
    """Why a row has no answer."""

    kind: ErrorKind
    message: str


@dataclass(frozen=True, slots=True)
class Row:
    """One input record: `value` is the prompt text or the messages as read, None for null."""

    id: RowId
    value: object


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the tokens of one request are drawn and when they end.

    `temperature` 0 is greedy. `draw_key` keys the random draws together with the position
    of the drawn token, so that a draw depends on nothing else. `stop_ids` end the text and
    count as an output token; `stop` strings end it where they begin.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    draw_key: bytes = b""


@dataclass(frozen=True, slots=True)
class Request:
    """A row as token ids. `output` are tokens that an earlier, interrupted run generated."""

    id: RowId
    prompt: Sequence[int]
    sampling: Sampling
    output: Sequence[int] = ()
    attempt: int = 1


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of one row: its tokens, or the reason why there are none.

    `stop_string` is the stop string that ended it, if one did. Times in seconds: `queue_s`
    from entering the engine to the first chunk, `prefill_s` from there to the first token,
    `decode_s` from there to the last, `longest_gap_s` between two tokens of the row.
    """

    id: RowId
    tokens: Sequence[int] = ()
    finish_reason: FinishReason | None = None
    stop_string: str | None = None
    prompt_tokens: int = 0
    error: RowError | None = None
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    longest_gap_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Partial:
    """Tokens generated so far for a row in flight."""

    id: RowId
    tokens: Sequence[int]
    attempt: int


@dataclass(frozen=True, slots=True)
class Step:
    """What one iteration of the engine did. Counts are of this step, times in seconds.

    `tokens_computed` includes `tokens_padded` (computed for nothing) and
    `tokens_recomputed` (lost to a preemption and computed again). `tokens_cached` came from
    the prefix cache. An idle step computes nothing: the engine waited for requests.
    """

    completions: Sequence[Completion] = ()
    prefill_tokens: int = 0
    decode_tokens: int = 0
    output_tokens: int = 0
    tokens_computed: int = 0
    tokens_padded: int = 0
    tokens_recomputed: int = 0
    tokens_cached: int = 0
    batch_size: int = 0
    running: int = 0
    waiting: int = 0
    preemptions: int = 0
    kv_blocks_used: int = 0
    kv_blocks: int = 0
    forward_s: float = 0.0
    step_s: float = 0.0

    @property
    def idle(self) -> bool:
        return self.batch_size == 0


class Requests(Protocol):
    """Where the engine pulls its requests from. Bounded, filled by someone else."""

    @property
    def exhausted(self) -> bool:
        """Nothing is left and nothing will come."""

    def take(self, limit: int) -> Iterable[Request]:
        """Hand over at most `limit` requests that are ready now; never blocks."""

    def wait(self, timeout_s: float) -> None:
        """Return when something is ready, all is exhausted, or the time is up."""


class TextStream(Protocol):
    """Turns tokens into text as they come; text appears once its bytes are complete."""

    def step(self, token: int) -> str:
        """The text that became complete with this token, often one token's worth."""


class Engine(Protocol):
    """What the job needs of an engine."""

    def run(self, requests: Requests) -> Iterator[Step]:
        """Serve requests until they are exhausted, one step a turn."""

    def partials(self) -> list[Partial]:
        """Every unfinished row that has at least one generated token."""
