"""How deep JSON may be nested does not depend on who reads it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from jobrunner.data.json_text import MOST_LEVELS, NestedTooDeep, read_json_text

Nest = Callable[[int], str]
NESTS: list[Nest] = [
    lambda levels: "[" * levels + "]" * levels,
    lambda levels: '{"a":' * levels + "1" + "}" * levels,
]


def deep_in_the_stack(frames: int, call: Callable[[], Any]) -> Any:
    return call() if frames == 0 else deep_in_the_stack(frames - 1, call)


@pytest.mark.parametrize("nest", NESTS)
def test_most_levels_are_read_and_one_more_is_not(nest: Nest) -> None:
    text = nest(MOST_LEVELS)
    assert read_json_text(text) == json.loads(text)
    with pytest.raises(NestedTooDeep, match="nested over 128 levels deep"):
        read_json_text(nest(MOST_LEVELS + 1))


@pytest.mark.parametrize("levels", [MOST_LEVELS + 1, 900, 100_000])
def test_the_same_is_too_deep_wherever_the_program_stands(levels: int) -> None:
    text = NESTS[0](levels)
    for frames in (0, sys.getrecursionlimit() // 2):
        with pytest.raises(NestedTooDeep):
            deep_in_the_stack(frames, lambda: read_json_text(text))


def test_what_a_second_key_hides_is_too_deep_all_the_same() -> None:
    with pytest.raises(NestedTooDeep):
        read_json_text(f'{{"a": {NESTS[0](900)}, "a": 1}}')


def test_many_brackets_beside_each_other_or_in_text_are_not_deep() -> None:
    value = {"text": '\\"[' * 500, "lists": [[]] * 500, "objects": [{}] * 500}
    assert read_json_text(json.dumps(value)) == value


def test_what_is_no_json_is_said_to_be_none() -> None:
    with pytest.raises(json.JSONDecodeError):
        read_json_text("[]" * 500)
