"""Count what all rows of a job would become: lengths, errors, repeats, shared beginnings.

Memory is bounded: it does not grow with rows, except that the numbers of repeated prompts and of
shared tokens become estimates beyond what fits. Knows nothing of files, models or terminals.
"""

from __future__ import annotations

import heapq
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from jobrunner.records import Completion, Request, RowError, RowId

Hashes = npt.NDArray[np.int64]

EXAMPLES_PER_KIND = 3
LONGEST_ROWS = 5
# distinct prompts that are counted exactly: 16 bytes each, and as many again while they are merged
EXACT_PROMPTS = 2**21
# blocks that the imagined prefix cache holds
CACHE_BLOCKS = 2**18
# lengths are exact below this many tokens, and to one part in so many beyond
EXACT_LENGTH = 2**16


@dataclass(frozen=True, slots=True)
class LongRow:
    """A row and the tokens of its prompt."""

    shard: str
    row: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class RowsReport:
    """What all rows would become. Lengths and needs are in tokens.

    `prompt_lengths` counts rows by the length of their prompt, of those that would run. `errors`
    and `examples` are by kind. `repeated_rows` have a prompt that an earlier row has; where
    `repeats_sampled` is over 1 they are estimated from one prompt in so many. `shared_tokens` are
    prompt tokens that a prefix cache of `cache_blocks` blocks, with no other use of its memory,
    would find when the rows come one after the other. A row's need is its prompt and all it may
    generate, over all its samples; `cut_rows` may generate less than the job says, because the
    model's context ends, and `outgrowing_rows` would be errors if they generated all they may,
    because the KV memory is too small.
    """

    rows: int
    errors: Mapping[str, int]
    examples: Mapping[str, tuple[str, ...]]
    prompt_lengths: Mapping[int, int]
    longest: tuple[LongRow, ...]
    prompt_tokens: int
    truncated_rows: int
    truncated_tokens: int
    cut_rows: int
    outgrowing_rows: int
    need_tokens: int
    need_max: int
    repeated_rows: int
    repeats_sampled: int
    shared_tokens: int
    cache_blocks: int

    @property
    def error_rows(self) -> int:
        return sum(self.errors.values())

    @property
    def ok_rows(self) -> int:
        return self.rows - self.error_rows

    def percentile(self, share: float) -> int | None:
        """The length that so large a share of the prompts does not exceed; None without prompts."""
        return percentile(self.prompt_lengths, share)


class Census:
    """Counts rows as they come, encoded.

    `max_new_tokens` is what the job lets a row generate, `max_model_len` the model's context.
    `kv_tokens`, if known, is the room of the KV memory: a prompt beyond it would be a
    `cannot_fit` error.
    """

    def __init__(
        self,
        *,
        max_new_tokens: int,
        max_model_len: int,
        block_size: int,
        kv_tokens: int | None = None,
    ) -> None:
        self._max_new_tokens = max_new_tokens
        self._max_model_len = max_model_len
        self._kv_tokens = kv_tokens
        self._rows = 0
        self._errors: Counter[str] = Counter()
        self._examples: dict[str, list[str]] = {}
        self._lengths: Counter[int] = Counter()
        self._longest: list[tuple[int, int, RowId]] = []
        self._prompt_tokens = 0
        self._truncated_rows = self._truncated_tokens = 0
        self._cut_rows = self._outgrowing_rows = self._need_tokens = self._need_max = 0
        self._repeats = Repeats()
        self._sharing = Sharing(block_size)

    def add(self, encoded: Sequence[Request | Completion]) -> None:
        """Count rows; of a row's samples the first counts for all."""
        for result in encoded:
            if isinstance(result, Completion):
                self._rows += 1
                if result.error is not None:
                    self._fail(result.error)
            elif result.sample == 0:
                self._rows += 1
                self._count(result)

    def report(self) -> RowsReport:
        """Sum up what was counted so far."""
        repeated, sampled = self._repeats.estimate()
        return RowsReport(
            rows=self._rows,
            errors=dict(sorted(self._errors.items())),
            examples={kind: tuple(found) for kind, found in sorted(self._examples.items())},
            prompt_lengths=dict(sorted(self._lengths.items())),
            longest=tuple(
                LongRow(row.shard, row.index, length)
                for length, _, row in sorted(self._longest, reverse=True)
            ),
            prompt_tokens=self._prompt_tokens,
            truncated_rows=self._truncated_rows,
            truncated_tokens=self._truncated_tokens,
            cut_rows=self._cut_rows,
            outgrowing_rows=self._outgrowing_rows,
            need_tokens=self._need_tokens,
            need_max=self._need_max,
            repeated_rows=repeated,
            repeats_sampled=sampled,
            shared_tokens=self._sharing.shared_tokens,
            cache_blocks=CACHE_BLOCKS,
        )

    def _count(self, request: Request) -> None:
        length = len(request.prompt)
        self._note_long(length, request.id)
        if self._kv_tokens is not None and length > self._kv_tokens:
            words = f"needs KV memory for {length:,} tokens, capacity {self._kv_tokens:,} tokens"
            self._fail(RowError("cannot_fit", f"{request.id} {words}"))
            return
        self._lengths[rounded(length)] += 1
        self._prompt_tokens += length
        if request.truncated_tokens:
            self._truncated_rows += 1
            self._truncated_tokens += request.truncated_tokens
        self._count_need(length, request)
        self._repeats.add(hash(tuple(request.prompt)))
        self._sharing.add(request.prompt)

    def _count_need(self, length: int, request: Request) -> None:
        new_tokens = request.sampling.max_new_tokens
        if new_tokens < self._max_new_tokens and length + new_tokens == self._max_model_len:
            self._cut_rows += 1
        # the KV of the last token is never needed
        if self._kv_tokens is not None and length + new_tokens - 1 > self._kv_tokens:
            self._outgrowing_rows += 1
        need = length + new_tokens * request.samples
        self._need_tokens += need
        self._need_max = max(self._need_max, need)

    def _note_long(self, length: int, row: RowId) -> None:
        longest = self._longest
        if len(longest) < LONGEST_ROWS:
            heapq.heappush(longest, (length, -self._rows, row))
        elif length > longest[0][0]:
            heapq.heapreplace(longest, (length, -self._rows, row))

    def _fail(self, error: RowError) -> None:
        self._errors[error.kind] += 1
        examples = self._examples.setdefault(error.kind, [])
        if len(examples) < EXAMPLES_PER_KIND:
            examples.append(error.message)


class Repeats:
    """Counts prompts that came before, by hashes of 64 bits, in bounded memory.

    Up to `limit` distinct prompts the count is exact but for two prompts with one hash. Beyond,
    only prompts whose hash falls into one of so many classes are kept, all their repeats with
    them, and the count is scaled up.
    """

    def __init__(self, limit: int = EXACT_PROMPTS) -> None:
        self._limit = limit
        self._new = array("q")
        self._hashes = np.empty(0, np.int64)
        self._counts = np.empty(0, np.int64)
        self._classes = 1

    def add(self, prompt_hash: int) -> None:
        """Count a prompt by its hash."""
        self._new.append(prompt_hash)
        if len(self._new) >= self._limit:
            self._merge()

    def estimate(self) -> tuple[int, int]:
        """How many prompts came before, and from one in how many prompts this is known."""
        self._merge()
        repeats = int(self._counts.sum()) - len(self._counts)
        return repeats * self._classes, self._classes

    def _merge(self) -> None:
        new = np.frombuffer(self._new, np.int64)
        new = new[_class_of(new, self._classes) == 0]
        hashes, inverse = np.unique(np.concatenate([self._hashes, new]), return_inverse=True)
        weights = np.concatenate([self._counts, np.ones(len(new), np.int64)])
        counts = np.zeros(len(hashes), np.int64)
        np.add.at(counts, inverse, weights)
        self._hashes, self._counts = hashes, counts
        while len(self._hashes) > self._limit:
            self._classes *= 2
            kept = _class_of(self._hashes, self._classes) == 0
            self._hashes, self._counts = self._hashes[kept], self._counts[kept]
        self._new = array("q")


def _class_of(hashes: Hashes, classes: int) -> Hashes:
    # the middle bits of a product depend on all lower ones: Fibonacci hashing
    mixed = hashes.view(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return ((mixed >> np.uint64(32)) % np.uint64(classes)).view(np.int64)


class Sharing:
    """An imagined prefix cache: counts prompt tokens that it would not compute again.

    As in the engine, a block is known by a hash over all tokens up to its end, and the last token
    of a prompt is never taken from the cache. The blocks used least recently are forgotten.
    """

    def __init__(self, block_size: int, capacity_blocks: int = CACHE_BLOCKS) -> None:
        self._block_size = block_size
        self._capacity = capacity_blocks
        # ordered by last use: a dict keeps the order of insertion
        self._blocks: dict[int, None] = {}
        self.shared_tokens = 0

    def add(self, prompt: Sequence[int]) -> None:
        """Look for the prompt's beginning, then remember all its full blocks."""
        size, blocks = self._block_size, self._blocks
        found, digest, hitting = 0, 0, True
        for stop in range(size, len(prompt), size):
            digest = hash((digest, *prompt[stop - size : stop]))
            if digest in blocks:
                del blocks[digest]
                found += hitting
            else:
                hitting = False
            blocks[digest] = None
        while len(blocks) > self._capacity:
            del blocks[next(iter(blocks))]
        self.shared_tokens += found * size


def rounded(length: int) -> int:
    """Round a great length down a little, so that the number of different lengths is bounded."""
    shift = max(0, length.bit_length() - EXACT_LENGTH.bit_length() + 1)
    return length >> shift << shift


def percentile(counts: Mapping[int, int], share: float) -> int | None:
    """The value that so large a share of what `counts`, sorted by value, counts does not exceed."""
    wanted = share * sum(counts.values())
    seen = 0
    for value, count in counts.items():
        seen += count
        if seen >= wanted:
            return value
    return None


def histogram(counts: Mapping[int, int], bins: int) -> list[tuple[int, int, int]]:
    """Count in at most `bins` equal bins: first value, last value, count of each.

    The width of a bin is 1, 2 or 5 times a power of ten. The bins go from the first that counts
    something to the last, those between included.
    """
    if not counts:
        return []
    low, high = min(counts), max(counts)
    width = next(w for w in _round_widths() if high // w - low // w < bins)
    counted = Counter[int]()
    for value, count in counts.items():
        counted[value // width] += count
    places = range(low // width, high // width + 1)
    return [(place * width, (place + 1) * width - 1, counted[place]) for place in places]


def doubling_histogram(counts: Mapping[int, int]) -> list[tuple[int, int, int]]:
    """Count in bins that double: 0, 1, 2 to 3, 4 to 7 and so on, from first to last."""
    counted = Counter[int]()
    for value, count in counts.items():
        counted[value.bit_length()] += count
    places = range(min(counted, default=0), max(counted, default=-1) + 1)
    return [(1 << place >> 1, (1 << place) - 1, counted[place]) for place in places]


def _round_widths() -> Iterator[int]:
    power = 1
    while True:
        yield from (power, 2 * power, 5 * power)
        power *= 10
