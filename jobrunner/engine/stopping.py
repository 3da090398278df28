"""Decide after each token whether a text ends. Knows nothing of models or scheduling."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from jobrunner.engine.repetition import Repetition
from jobrunner.records import FinishReason, Sampling, TextStream

OpenText = Callable[[], TextStream]


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a text ended, and the stop string that did it, if one did."""

    reason: FinishReason
    stop_string: str | None = None


class Stopping:
    """Watches the output of one sequence; the prompt is never shown to it.

    A text ends with a token, in this order: if that is a stop id; if a stop string becomes whole
    with it; if the text repeats itself (see `Repetition`); if there are `max_new_tokens`. Only the
    last of these ends it within its first `min_new_tokens`; a stop string that became whole in
    there is passed over for good. Only as much text is kept as a stop string could still begin in.
    """

    def __init__(self, sampling: Sampling, open_text: OpenText) -> None:
        self._sampling = sampling
        self._stream = open_text() if sampling.stop else None
        self._keep = max(map(len, sampling.stop), default=1) - 1
        self._tail = ""
        self._count = 0
        length = sampling.stop_on_repetition
        self._repetition = Repetition(length) if length else None

    def replay(self, tokens: Iterable[int]) -> tuple[int, Ending | None]:
        """Show the output of an earlier run; return how many tokens count and how it ended."""
        if self._sampling.max_new_tokens < 1:
            return 0, Ending("length")
        for token in tokens:
            ending = self.after(token)
            if ending is not None:
                return self._count, ending
        return self._count, None

    def after(self, token: int) -> Ending | None:
        """Show the next output token; return the ending if the text ends with it."""
        self._count += 1
        may_end = self._count > self._sampling.min_new_tokens
        if may_end and token in self._sampling.stop_ids:
            return Ending("stop")
        # both watch all tokens, those too that may not end the text
        stop = self._stop_string(token)
        repeats = self._repetition is not None and self._repetition.after(token)
        if may_end and stop is not None:
            return Ending("stop", stop)
        if may_end and repeats:
            return Ending("repetition")
        if self._count >= self._sampling.max_new_tokens:
            return Ending("length")
        return None

    def _stop_string(self, token: int) -> str | None:
        """The stop string that becomes whole with this token; of several, the first to begin."""
        if self._stream is None:
            return None
        text = self._tail + self._stream.step(token)
        known = len(self._tail)
        found = [
            (place, stop)
            for stop in self._sampling.stop
            # one that lies in the tail as a whole was passed over
            if (place := text.find(stop, max(0, known - len(stop) + 1))) >= 0
        ]
        self._tail = text[-self._keep :] if self._keep else ""
        return min(found)[1] if found else None
