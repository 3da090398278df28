"""Cut what is too long at token boundaries. Knows nothing of templates or tokenizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Side = Literal["truncate_left", "truncate_right", "truncate_middle"]


def cut_ids(ids: Sequence[int], kept: int, side: Side) -> list[int]:
    """Keep so many of the ids: the last, the first, or the first and last half."""
    head, tail = _shares(kept, side)
    return [*ids[:head], *ids[len(ids) - tail :]]


def cut_text(text: str, ends: Sequence[int], kept: int, side: Side) -> str:
    """Keep so many of the tokens of a text; `ends` says where each ends, in characters."""
    head, tail = _shares(kept, side)
    if kept >= len(ends):
        return text
    before = text[: ends[head - 1]] if head else ""
    # from the end of the token before, not from the start of the first kept one: a space
    # in front belongs to it, and half a character does not
    return before + (text[ends[len(ends) - tail - 1] :] if tail else "")


def _shares(kept: int, side: Side) -> tuple[int, int]:
    """How many tokens stay at the beginning and at the end."""
    if side == "truncate_left":
        return 0, kept
    if side == "truncate_right":
        return kept, 0
    return kept - kept // 2, kept // 2
