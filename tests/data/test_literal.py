"""Text that spells special tokens stays text; what templates write stays special."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobrunner.data.prompts.prompts import Prompts
from jobrunner.data.prompts.tokenizer import Tokenizer
from tests.prompt_jobs import only_request, open_prompts, outcomes_of, request_of
from tests.properties import examples
from tests.tiny_tokenizers import (
    byte_fallback,
    byte_level,
    double_bos,
    eager_specials,
    metaspace,
    unigram,
)

BUILDERS = [byte_level, double_bos, byte_fallback, metaspace, unigram, eager_specials]
START, END = "<|im_start|>", "<|im_end|>"
PIECES = st.sampled_from(
    ["ABC", " Hello", "world ", " ", "\n", "x", "<", "<|", "<|im_", "im_end|>", ">", START, END]
)
TEXT = st.lists(PIECES, max_size=6).map("".join)


@pytest.fixture(scope="module", params=BUILDERS, ids=lambda build: build.__name__)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = request.param(tmp_path_factory.mktemp("models"))
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def raw(folder: Path) -> Prompts:
    return open_prompts(folder)


@pytest.fixture(scope="module")
def chat(folder: Path) -> Prompts:
    return open_prompts(folder, chat=True)


@pytest.fixture(scope="module")
def messages(folder: Path) -> Prompts:
    return open_prompts(folder, messages="m", chat=True)


def count(prompts: Prompts, ids: Any, token: str) -> int:
    wanted = prompts._tokenizer.loaded.convert_tokens_to_ids(token)
    return list(ids).count(wanted)


@given(text=TEXT, whole=st.booleans())
@examples(60)
def test_marked_text_without_marks_is_encoded_as_ever(
    tokenizer: Tokenizer, text: str, whole: bool
) -> None:
    assert [tokenizer.literal.encode(text, whole=whole)] == tokenizer.encode([text], whole=whole)


@given(text=TEXT)
@examples(60)
def test_case_M_what_a_prompt_spells_is_never_special(
    raw: Prompts, chat: Prompts, text: str
) -> None:
    asked = text + "x"
    for token in (START, END):
        assert count(raw, request_of(raw, asked).prompt, token) == 0
    ids = request_of(chat, asked).prompt
    assert (count(chat, ids, START), count(chat, ids, END)) == (2, 1)


@given(turns=st.lists(st.tuples(st.sampled_from(["user", END, "<|im_", "a"]), TEXT), min_size=1))
@examples(60)
def test_case_M_what_messages_spell_is_never_special(
    messages: Prompts, turns: list[tuple[str, str]]
) -> None:
    value = [{"role": role, "content": content} for role, content in turns]
    ids = request_of(messages, value).prompt
    assert count(messages, ids, START) == len(turns) + 1
    assert count(messages, ids, END) == len(turns)


@given(texts=st.lists(TEXT, min_size=1, max_size=4))
@examples(40)
def test_case_M_neighbours_of_a_row_that_spells_are_encoded_as_alone(
    chat: Prompts, texts: list[str]
) -> None:
    records = [{"p": text + "x"} for text in texts]
    together = [only_request([outcome]).prompt for outcome in outcomes_of(chat, *records)]
    assert together == [only_request(outcomes_of(chat, record)).prompt for record in records]


def test_case_M_spelled_text_comes_back_as_it_was(tmp_path: Path) -> None:
    raw = open_prompts(byte_level(tmp_path))
    text = f"a {END} b{START}<|bos|>{END}<|im_start"
    assert raw.prompt_text(request_of(raw, text)) == text
    assert len(request_of(raw, END).prompt) == len(END)


def test_case_M_bos_of_the_tokenizer_stays_when_the_prompt_spells_it(tmp_path: Path) -> None:
    raw = open_prompts(double_bos(tmp_path))
    ids = list(request_of(raw, "<|bos|>x").prompt)
    assert ids[0] == 0
    assert ids.count(0) == 1


def test_case_M_system_message_of_the_job_is_text(tmp_path: Path) -> None:
    prompts = open_prompts(byte_level(tmp_path), chat=True, system=f"Never write {END}.")
    ids = request_of(prompts, "x").prompt
    assert count(prompts, ids, END) == 2
    assert f"Never write {END}.{END}" in prompts.prompt_text(request_of(prompts, "x"))


def test_case_M_columns_in_a_template_are_text_and_the_template_is_not(tmp_path: Path) -> None:
    prompts = open_prompts(byte_level(tmp_path), template=f"{START}{{{{ a }}}}{END}")
    ids = only_request(outcomes_of(prompts, {"a": f"x{END}"})).prompt
    assert (count(prompts, ids, START), count(prompts, ids, END)) == (1, 1)
    assert len(ids) == 3 + len(END)


def test_case_M_parts_that_spell_a_token_together_are_text(tmp_path: Path) -> None:
    template = "{% for part in messages[0].content %}{{ part.text }}{% endfor %}"
    prompts = open_prompts(byte_level(tmp_path, template=template), messages="m", chat=True)
    parts = [{"type": "text", "text": "<|im_"}, {"type": "text", "text": "end|>"}]
    request = request_of(prompts, [{"role": "user", "content": parts}])
    assert (count(prompts, request.prompt, END), len(request.prompt)) == (0, len(END))


def test_case_M_tools_are_text(tmp_path: Path) -> None:
    template = "{{ tools | tojson }}{{ messages[0].content }}"
    prompts = open_prompts(byte_level(tmp_path, template=template), chat=True, tools="t")
    request = only_request(outcomes_of(prompts, {"p": "x", "t": [{"name": END, END: 1}]}))
    assert count(prompts, request.prompt, END) == 0
    assert prompts.prompt_text(request) == f'[{{"name": "{END}", "{END}": 1}}]x'
