"""Tell whether outcomes are answers or explanations. Knows nothing of files or of the input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from jobrunner.records import ErrorKind, FinishReason

Outcome = Mapping[str, Any]
COUNTS = ("prompt_tokens", "output_tokens", "truncated_tokens", "chunks")
TOKEN_LISTS = ("token_ids", "logprobs")
ANSWER = ("text", "finish_reason", *TOKEN_LISTS, "samples")


def is_sound(outcome: Outcome) -> bool:
    """Tell whether a row is answered or explained, and says the same in all its columns."""
    if any(outcome.get(name, 0) < 0 for name in COUNTS):
        return False
    if outcome["status"] == "ok":
        return _is_answered(outcome)
    return outcome["status"] == "error" and _is_explained(outcome)


def _is_answered(outcome: Outcome) -> bool:
    """An ok row has a text, a reason to end, as many tokens as it says, and no error."""
    if outcome["error_kind"] is not None or outcome["error"] is not None:
        return False
    if "samples" not in outcome:
        return _is_text(outcome) and _has_tokens(outcome, outcome["output_tokens"])
    samples = outcome["samples"]
    if not samples or not all(_is_sample(sample) for sample in samples):
        return False
    if sum(sample["output_tokens"] for sample in samples) != outcome["output_tokens"]:
        return False
    first = samples[0]
    same = ("text", "finish_reason", *(name for name in TOKEN_LISTS if name in outcome))
    return all(first[name] == outcome[name] for name in same)


def _is_explained(outcome: Outcome) -> bool:
    """An error row has a kind and a message, and nothing of an answer."""
    return (
        outcome["error_kind"] in get_args(ErrorKind)
        and bool(outcome["error"])
        and all(outcome.get(name) is None for name in ANSWER)
    )


def _is_sample(sample: Outcome) -> bool:
    """A sample has what was asked for; what was not is null."""
    asked = {name: sample[name] for name in TOKEN_LISTS if sample[name] is not None}
    return _is_text(sample) and _has_tokens(asked, sample["output_tokens"])


def _is_text(answer: Outcome) -> bool:
    return answer["text"] is not None and answer["finish_reason"] in get_args(FinishReason)


def _has_tokens(answer: Outcome, tokens: int) -> bool:
    lists = [answer[name] for name in TOKEN_LISTS if name in answer]
    return all(values is not None and len(values) == tokens for values in lists)
