"""The frozen types that cross folders. Know nothing of files, tensors or text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

ErrorKind = Literal[
    "null_prompt",
    "empty_prompt",
    "bad_type",
    "bad_text",
    "template_error",
    "bad_params",
    "prompt_too_long",
    "cannot_fit",
    "internal",
]
FinishReason = Literal["stop", "length", "repetition"]


class RowId(NamedTuple):
    """Identity of a row: where it stands in the input, never what it says."""

    shard: str
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here

    def __str__(self) -> str:
        """Name the row to a person."""
        return f"row {self.index:,} of `{self.shard}`"


class SampleId(NamedTuple):
    """Identity of one of the n samples of a row, counted from 0."""

    row: RowId
    sample: int = 0


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
    """One input record, as read.

    `value` comes from the column of prompts (text, messages or token ids), None for null or where
    a template makes the prompt; `others` holds the other columns that prompts and parameters are
    made of, by name. `error` says why the record could not be read at all.
    """

    id: RowId
    value: object
    others: Mapping[str, object] = field(default_factory=dict)
    error: RowError | None = None


class TokenLogprob(NamedTuple):
    """The log-probability of a chosen token, and the likeliest tokens with theirs, best first.

    Natural logarithms of the model's own distribution, before temperature, penalties or cuts.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the tokens of one request are drawn and when they end.

    `temperature` 0 is greedy. `draw_key` keys the random draws together with the position
    of the drawn token, so that a draw depends on nothing else. `stop_ids` end the text and
    count as an output token; `stop` strings end it where they begin; neither ends it before
    `min_new_tokens`. `top_k` 0, `min_p` 0, a repetition penalty of 1 and the other penalties of
    0 are off. `stop_on_repetition`, if not 0, ends a text whose last so many tokens repeat
    themselves. `logprobs` asks for log-probabilities: of the chosen tokens and of so many of the
    likeliest ones; None asks for none.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    draw_key: bytes = b""
    min_new_tokens: int = 0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop_on_repetition: int = 0
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One sample of a row as token ids.

    `output` are tokens that an earlier, interrupted run generated, `logprobs` theirs, if they
    are wanted. `truncated_tokens` were cut from the prompt. `priority` 0 goes first. `arrival_s`,
    seconds from the start of the job, holds a row back until then, where arrivals are replayed.
    """

    id: RowId
    prompt: Sequence[int]
    sampling: Sampling
    output: Sequence[int] = ()
    attempt: int = 1
    sample: int = 0
    samples: int = 1
    truncated_tokens: int = 0
    logprobs: Sequence[TokenLogprob] = ()
    priority: int = 0
    arrival_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of one sample of a row: its tokens, or the reason why there are none.

    `request` is what the engine was asked, None for a row that never got that far. `chunks`
    counts the pieces that the prompt was prefilled in, those after a preemption too.
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
    request: Request | None = None
    logprobs: Sequence[TokenLogprob] = ()
    chunks: int = 0


@dataclass(frozen=True, slots=True)
class Partial:
    """Tokens generated so far for one sample of a row in flight."""

    id: RowId
    tokens: Sequence[int]
    attempt: int
    sample: int = 0
    logprobs: Sequence[TokenLogprob] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """What one iteration of the engine did. Counts are of this step, times in seconds.

    `tokens_computed` includes `tokens_padded` (computed for nothing) and
    `tokens_recomputed` (lost to a preemption and computed again). `tokens_cached` came from
    the prefix cache. `context_tokens` sums over its sequences how many tokens each already
    had in KV memory, `attended_tokens` over its prompt tokens how many each attends to: itself and
    all before it. `swapped_blocks` were copied to host memory or back; of `forward_s` the device
    waited `swap_s` for copies. `duplicates` of the completions are the answers of equal requests.
    So far `out_of_memory` steps found no memory, and these are the limits now: `token_budget`,
    `max_batch_size`. An idle step computes nothing: the engine waited for requests.
    """

    completions: Sequence[Completion] = ()
    prefill_tokens: int = 0
    decode_tokens: int = 0
    output_tokens: int = 0
    tokens_computed: int = 0
    tokens_padded: int = 0
    tokens_recomputed: int = 0
    tokens_cached: int = 0
    context_tokens: int = 0
    attended_tokens: int = 0
    batch_size: int = 0
    running: int = 0
    waiting: int = 0
    preemptions: int = 0
    swapped_blocks: int = 0
    duplicates: int = 0
    out_of_memory: int = 0
    token_budget: int = 0
    max_batch_size: int = 0
    kv_blocks_used: int = 0
    kv_blocks: int = 0
    forward_s: float = 0.0
    swap_s: float = 0.0
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

    def withdraw(self) -> list[Request]:
        """Give back the requests that have not begun, to be asked for again or by others."""
