"""Prompts that are too long: refused, or cut in what users wrote, at token boundaries."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobrunner.data.prompts.prompts import Prompts
from jobrunner.data.prompts.truncation import Side, cut_ids, cut_text
from jobrunner.records import Completion, Request
from tests.prompt_jobs import encode, kinds, open_prompts, outcomes_of, request_of
from tests.properties import examples
from tests.tiny_tokenizers import byte_fallback, byte_level

SIDES: list[Side] = ["truncate_left", "truncate_right", "truncate_middle"]
START = "<|im_start|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_level(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module", params=[byte_level, byte_fallback])
def prompts_of_both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[Side, bool], Prompts]:
    folder = request.param(tmp_path_factory.mktemp("models"))
    return {
        (side, chat): open_prompts(
            folder, too_long=side, chat=chat, max_model_len=64, max_new_tokens=8
        )
        for side in SIDES
        for chat in (False, True)
    }


def shown(prompts: Prompts, request: Request) -> str:
    return prompts.prompt_text(request)


class TestCuts:
    @given(size=st.integers(0, 9), data=st.data(), side=st.sampled_from(SIDES))
    def test_ids_and_text_are_cut_at_the_same_places(
        self, size: int, data: st.DataObject, side: Side
    ) -> None:
        kept = data.draw(st.integers(0, size))
        words = [f"w{number} " for number in range(size)]
        ends = [sum(map(len, words[: number + 1])) for number in range(size)]
        ids = cut_ids(range(size), kept, side)
        assert len(ids) == kept
        assert cut_text("".join(words), ends, kept, side) == "".join(words[i] for i in ids)

    def test_sides(self) -> None:
        cut = {side: cut_ids(range(9), 5, side) for side in SIDES}
        assert cut == {
            "truncate_left": [4, 5, 6, 7, 8],
            "truncate_right": [0, 1, 2, 3, 4],
            "truncate_middle": [0, 1, 2, 7, 8],
        }


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("side", SIDES)
def test_case_K_truncated_prompts_leave_room_for_all_new_tokens(
    folder: Path, side: Side, chat: bool
) -> None:
    whole = open_prompts(folder, chat=chat, max_model_len=9_999)
    frame = len(request_of(whole, "x").prompt) - 1
    prompts = open_prompts(
        folder, too_long=side, chat=chat, max_model_len=32 + frame, max_new_tokens=4
    )
    texts = ["x" * length for length in (28, 29, 31, 32, 40)]
    outcomes = encode(prompts, *texts)
    assert kinds(outcomes) == ["ok"] * 5
    requests = [outcome for outcome in outcomes if isinstance(outcome, Request)]
    assert {len(request.prompt) for request in requests} == {28 + frame}
    assert {request.sampling.max_new_tokens for request in requests} == {4}
    assert [request.truncated_tokens for request in requests] == [0, 1, 3, 4, 12]


@given(
    text=st.text("ABC Hé😀<|im_end>.", max_size=200),
    side=st.sampled_from(SIDES),
    chat=st.booleans(),
)
@examples(80)
def test_cut_prompts_fit_and_keep_what_the_template_wrote(
    prompts_of_both: dict[tuple[Side, bool], Prompts], text: str, side: Side, chat: bool
) -> None:
    prompts = prompts_of_both[side, chat]
    (outcome,) = encode(prompts, text + "x")
    assert isinstance(outcome, Request), outcome
    assert len(outcome.prompt) + outcome.sampling.max_new_tokens <= 64
    assert outcome.sampling.max_new_tokens == 8
    seen = shown(prompts, outcome)
    if chat:
        # the id of START, written twice by the template
        assert list(outcome.prompt).count(1) == 2
        assert "user\n" in seen
        assert seen.endswith("assistant\n")


def test_left_keeps_the_end_right_the_beginning_middle_both(folder: Path) -> None:
    text = "".join(map(chr, range(ord("a"), ord("z") + 1)))
    kept = {}
    for side in SIDES:
        prompts = open_prompts(folder, too_long=side, max_model_len=10, max_new_tokens=4)
        kept[side] = shown(prompts, request_of(prompts, text))
    assert kept == {
        "truncate_left": "uvwxyz",
        "truncate_right": "abcdef",
        "truncate_middle": "abcxyz",
    }


def test_no_character_is_torn(folder: Path) -> None:
    for side in SIDES:
        for limit in range(6, 30):
            prompts = open_prompts(folder, too_long=side, max_model_len=limit, max_new_tokens=1)
            assert set(shown(prompts, request_of(prompts, "😀" * 9))) == {"😀"}


def test_prompt_stays_whole_where_no_cut_would_make_room_for_all_new_tokens(folder: Path) -> None:
    prompts = open_prompts(folder, too_long="truncate_left", max_model_len=20, max_new_tokens=4_096)
    request = request_of(prompts, "x" * 19)
    assert (len(request.prompt), request.sampling.max_new_tokens) == (19, 1)
    request = request_of(prompts, "x" * 25)
    assert (len(request.prompt), request.truncated_tokens) == (19, 6)


def test_template_that_alone_is_too_long_is_an_error_row(folder: Path) -> None:
    prompts = open_prompts(
        folder, too_long="truncate_left", chat=True, max_model_len=15, max_new_tokens=2
    )
    (outcome,) = encode(prompts, "x" * 30)
    assert isinstance(outcome, Completion)
    assert kinds([outcome]) == ["prompt_too_long"]
    assert outcome.prompt_tokens > 30


def test_longest_message_is_cut_first_and_roles_never(folder: Path) -> None:
    prompts = open_prompts(
        folder,
        messages="m",
        chat=True,
        system="s" * 9,
        too_long="truncate_right",
        max_model_len=100,
        max_new_tokens=4,
    )
    turns = [{"role": "user", "content": "a" * 5}, {"role": "user", "content": "b" * 99}]
    seen = shown(prompts, request_of(prompts, turns))
    assert "s" * 9 + "<|im_end|>" in seen
    assert "user\naaaaa<|im_end|>" in seen
    assert "user\nbb" in seen
    assert "b" * 60 not in seen


def test_more_messages_are_cut_if_one_is_not_enough(folder: Path) -> None:
    prompts = open_prompts(
        folder,
        messages="m",
        chat=True,
        too_long="truncate_right",
        max_model_len=60,
        max_new_tokens=4,
    )
    turns = [{"role": "user", "content": letter * 50} for letter in "ab"]
    request = request_of(prompts, turns)
    assert len(request.prompt) == 56
    assert list(request.prompt).count(1) == 3


def test_columns_of_a_template_are_cut_and_its_words_are_not(folder: Path) -> None:
    prompts = open_prompts(
        folder,
        template="Q: {{ q }} B:",
        too_long="truncate_left",
        max_model_len=20,
        max_new_tokens=4,
    )
    (outcome,) = outcomes_of(prompts, {"q": "x" * 30 + "y"})
    assert isinstance(outcome, Request)
    assert shown(prompts, outcome) == "Q: " + "x" * 9 + "y B:"


def test_token_ids_are_cut_too(folder: Path) -> None:
    prompts = open_prompts(
        folder, token_ids="t", too_long="truncate_middle", max_model_len=10, max_new_tokens=4
    )
    request = request_of(prompts, list(range(10, 30)))
    assert request.prompt == [10, 11, 12, 27, 28, 29]
    assert request.truncated_tokens == 14


def test_room_is_that_of_the_row(folder: Path) -> None:
    prompts = open_prompts(
        folder, too_long="truncate_left", params="max_new_tokens", max_model_len=20
    )
    records: list[dict[str, Any]] = [{"p": "x" * 30, "max_new_tokens": n} for n in (1, 5, 19)]
    lengths = [len(o.prompt) for o in outcomes_of(prompts, *records) if isinstance(o, Request)]
    assert lengths == [19, 15, 1]
    assert all(a > b for a, b in pairwise(lengths))
