"""What there is to know of a token before it is drawn. Knows nothing of tensors or of models."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import NamedTuple

from jobrunner.records import Sampling


class Occurrences:
    """The distinct tokens of a text, and how often each stands in its output.

    `tokens` and `counts` run side by side, in the order in which the tokens first came; the
    count of a token that only the prompt holds is 0.
    """

    def __init__(self, prompt: Iterable[int] = (), output: Iterable[int] = ()) -> None:
        self.tokens = array("q")
        self.counts = array("q")
        self._places: dict[int, int] = {}
        for token in prompt:
            self._place(token)
        for token in output:
            self.add(token)

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, token: int) -> None:
        """Count one more token of the output."""
        self.counts[self._place(token)] += 1

    def _place(self, token: int) -> int:
        place = self._places.setdefault(token, len(self.tokens))
        if place == len(self.tokens):
            self.tokens.append(token)
            self.counts.append(0)
        return place


def occurrences(
    sampling: Sampling, prompt: Iterable[int], output: Iterable[int]
) -> Occurrences | None:
    """Count what the penalties of a sampling look at; None where it has no penalty."""
    if sampling.repetition_penalty != 1:
        return Occurrences(prompt, output)
    if sampling.presence_penalty or sampling.frequency_penalty:
        # these two look at the output alone
        return Occurrences(output=output)
    return None


def is_plain(sampling: Sampling) -> bool:
    """Tell whether the likeliest token is all that is ever wanted."""
    return (
        sampling.temperature == 0
        and sampling.repetition_penalty == 1
        and sampling.presence_penalty == 0
        and sampling.frequency_penalty == 0
        and sampling.min_new_tokens == 0
        and sampling.logprobs is None
    )


class Draw(NamedTuple):
    """One token to be drawn: by which rules, the how-manieth of its output (from 0), after what."""

    sampling: Sampling
    position: int = 0
    occurrences: Occurrences | None = None

    @property
    def ruled(self) -> bool:
        """Whether it may come to another token than the likeliest."""
        early = self.position < self.sampling.min_new_tokens
        return self.sampling.temperature > 0 or early or bool(self.occurrences)
