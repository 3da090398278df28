"""Rows to token ids and back, on tiny real tokenizers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from jobrunner.data.prompts.prompts import Prompts
from jobrunner.errors import ConfigError, ModelError
from jobrunner.records import (
    Completion,
    FinishReason,
    Partial,
    Request,
    Row,
    RowError,
    RowId,
    SampleId,
)
from tests.prompt_jobs import (
    encode,
    error_of,
    kinds,
    only_error,
    only_request,
    open_prompts,
    outcomes_of,
    request_of,
    rows_of,
)
from tests.properties import examples
from tests.tiny_tokenizers import byte_fallback, byte_level, double_bos

BUILDERS = {"byte_level": byte_level, "double_bos": double_bos, "byte_fallback": byte_fallback}
UTF8_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@dataclass(frozen=True)
class Model:
    """A model folder and what transformers makes of it."""

    folder: Path
    tokenizer: Any
    raw: Prompts

    def prompts(self, **changes: Any) -> Prompts:
        return open_prompts(self.folder, **changes)

    def ids(self, *tokens: str) -> list[int]:
        ids: list[int] = self.tokenizer.convert_tokens_to_ids(list(tokens))
        assert None not in ids
        return ids


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    base = tmp_path_factory.mktemp("models")
    known = {}
    for name, build in BUILDERS.items():
        folder = build(base / name)
        known[name] = Model(folder, AutoTokenizer.from_pretrained(folder), open_prompts(folder))
    return known


@pytest.fixture(scope="module", params=list(BUILDERS))
def each(request: pytest.FixtureRequest, known: dict[str, Model]) -> Model:
    return known[request.param]


@pytest.fixture(scope="module")
def model(known: dict[str, Model]) -> Model:
    return known["byte_level"]


def text_of(
    prompts: Prompts,
    tokens: Sequence[int],
    finish_reason: FinishReason = "length",
    stop_string: str | None = None,
) -> str:
    request = request_of(prompts, "x")
    completion = Completion(request.id, tokens, finish_reason, stop_string, request=request)
    return prompts.text(completion)


class TestPrompts:
    @given(texts=st.lists(UTF8_TEXT, max_size=4))
    def test_raw_prompts_are_what_the_tokenizer_says(self, each: Model, texts: list[str]) -> None:
        outcomes = encode(each.raw, *texts)
        found = [outcome.prompt if isinstance(outcome, Request) else [] for outcome in outcomes]
        assert found == [each.tokenizer(text)["input_ids"] for text in texts]

    def test_chat_prompts_are_what_transformers_says(self, each: Model) -> None:
        turns = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello 😀"},
        ]
        expected = each.tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, return_dict=False
        )
        as_prompt = each.prompts(chat="auto", system="Be brief.")
        as_messages = each.prompts(chat="auto", messages="m")
        assert request_of(as_prompt, "Hello 😀").prompt == expected
        assert request_of(as_messages, turns).prompt == expected

    def test_auto_chat_without_template_is_raw(self, model: Model, tmp_path: Path) -> None:
        raw = open_prompts(byte_level(tmp_path, template=None), chat="auto")
        assert request_of(raw, "ABC").prompt == model.ids("ABC")

    @pytest.mark.parametrize("chat", [True, False])
    def test_case_R_template_and_tokenizer_add_one_bos(
        self, known: dict[str, Model], chat: bool
    ) -> None:
        twice = known["double_bos"]
        ids = list(request_of(twice.prompts(chat=chat), "Hello").prompt)
        assert ids[0] == twice.tokenizer.bos_token_id
        assert ids.count(ids[0]) == 1

    def test_messages_may_bring_their_own_system_prompt(self, model: Model) -> None:
        own = [{"role": "system", "content": "own"}, {"role": "user", "content": "x"}]
        ours = [{"role": "system", "content": "ours"}, {"role": "user", "content": "x"}]
        plain = model.prompts(messages="m", chat="auto")
        prompts = model.prompts(messages="m", chat="auto", system="ours")
        assert request_of(prompts, own).prompt == request_of(plain, own).prompt
        assert request_of(prompts, own[1:]).prompt == request_of(plain, ours).prompt

    def test_nulls_that_arrow_adds_to_messages_are_no_keys(self, tmp_path: Path) -> None:
        template = "{% for turn in messages %}{{ turn.keys() | list }}{% endfor %}"
        prompts = open_prompts(byte_level(tmp_path, template=template), messages="m", chat=True)
        turns = [{"role": "user", "content": "x", "tool_calls": None, "name": None}]
        assert prompts.prompt_text(request_of(prompts, turns)) == "['role', 'content']"

    def test_tokenizer_file_that_asks_for_truncation_cuts_no_prompt(self, tmp_path: Path) -> None:
        byte_level(tmp_path)
        tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        tokenizer.enable_truncation(2)
        tokenizer.enable_padding(length=8)
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        assert len(request_of(open_prompts(tmp_path), "ABC" * 5).prompt) == 5

    def test_resumed_row_goes_on_as_the_next_attempt(self, model: Model) -> None:
        rows = rows_of("ABC", "DEF")
        saved = {SampleId(rows[1].id): Partial(rows[1].id, tokens=(7, 8), attempt=2)}
        fresh, resumed = model.raw.encode(rows, saved)
        assert isinstance(fresh, Request)
        assert isinstance(resumed, Request)
        assert (fresh.output, fresh.attempt) == ((), 1)
        assert (resumed.output, resumed.attempt) == ((7, 8), 3)

    def test_no_rows_give_no_requests(self, model: Model) -> None:
        assert encode(model.raw) == []


class TestOpenAi:
    def outcomes(self, prompts: Prompts, url: str, **body: object) -> list[Request | Completion]:
        line = {"custom_id": "1", "method": "POST", "url": url, "body": body}
        return outcomes_of(prompts, line)

    def test_chat_goes_through_the_template_and_a_completion_does_not(self, model: Model) -> None:
        prompts = model.prompts(prompt=None, format="openai", chat="auto")
        turns = [{"role": "user", "content": "x"}]
        chat = self.outcomes(prompts, "/v1/chat/completions", messages=turns)
        raw = self.outcomes(prompts, "/v1/completions", prompt="ABC")
        ids = self.outcomes(prompts, "/v1/completions", prompt=[5, 6])
        as_chat = request_of(model.prompts(chat=True), "x")
        assert only_request(chat).prompt == as_chat.prompt
        assert only_request(raw).prompt == model.ids("ABC")
        assert only_request(ids).prompt == [5, 6]

    def test_body_sets_parameters_and_log_probabilities(self, model: Model) -> None:
        prompts = model.prompts(prompt=None, format="openai", chat="auto", logprobs=7)
        plain = self.outcomes(prompts, "/v1/completions", prompt="x")
        asked = self.outcomes(
            prompts, "/v1/completions", prompt="x", max_tokens=3, top_p=0.5, logprobs=2, n=2
        )
        assert only_request(plain).sampling.logprobs == 7
        assert len(asked) == 2
        for request in asked:
            assert isinstance(request, Request)
            sampling = request.sampling
            assert (sampling.max_new_tokens, sampling.top_p, sampling.logprobs) == (3, 0.5, 2)

    def test_case_Q_bad_parameter_in_a_body_is_an_error_row(self, model: Model) -> None:
        prompts = model.prompts(prompt=None, format="openai", chat="auto")
        kind, words = only_error(
            self.outcomes(prompts, "/v1/completions", prompt="x", temperature=-1)
        )
        assert kind == "bad_params"
        assert words.startswith("has in its body `temperature` = -1: ")

    def test_case_I_an_error_that_names_what_is_no_unicode_can_be_written(
        self, model: Model
    ) -> None:
        prompts = model.prompts(prompt=None, format="openai", chat="auto")
        failed = self.outcomes(prompts, "/v1/completions", prompt="x", **{"\ud800": 1})
        assert only_error(failed) == (
            "bad_params",
            "asks for what cannot be done here: `\\ud800`",
        )

    def test_chat_without_a_template_is_an_error_row(self, tmp_path: Path) -> None:
        bare = byte_level(tmp_path, template=None)
        prompts = open_prompts(bare, prompt=None, format="openai", chat="auto")
        turns = [{"role": "user", "content": "x"}]
        failed = self.outcomes(prompts, "/v1/chat/completions", messages=turns)
        assert only_error(failed)[0] == "template_error"


class TestRowErrors:
    def test_record_that_could_not_be_read_stays_its_error(self, model: Model) -> None:
        error = RowError("bad_type", "row 0 of `a` is no JSON")
        outcome = model.raw.encode([Row(RowId("a", 0), None, error=error)], {})
        assert outcome == [Completion(RowId("a", 0), error=error)]

    def test_case_J_empty_null_and_blank_prompts(self, model: Model) -> None:
        values = ("ok", "", None, "   ")
        expected = ["ok", "empty_prompt", "null_prompt", "ok"]
        assert kinds(encode(model.raw, *values)) == expected
        assert kinds(encode(model.prompts(chat=True), *values)) == expected

    def test_case_J_empty_prompt_with_a_bos_is_generated(self, known: dict[str, Model]) -> None:
        twice = known["double_bos"]
        assert request_of(twice.raw, "").prompt == [twice.tokenizer.bos_token_id]
        assert kinds(encode(twice.prompts(chat=True), "")) == ["empty_prompt"]

    def test_case_K_new_tokens_fit_the_room_that_is_left(self, model: Model) -> None:
        prompts = model.prompts(max_model_len=32, max_new_tokens=4)
        outcomes = encode(prompts, *("x" * length for length in (28, 29, 31, 32, 40)))
        assert kinds(outcomes) == ["ok", "ok", "ok", "prompt_too_long", "prompt_too_long"]
        assert [
            outcome.sampling.max_new_tokens for outcome in outcomes if isinstance(outcome, Request)
        ] == [4, 3, 1]
        assert isinstance(outcomes[4], Completion)
        assert outcomes[4].prompt_tokens == 40

    def test_too_long_names_row_length_and_limit(self, model: Model) -> None:
        prompts = model.prompts(max_model_len=8_192)
        rows = [Row(RowId("b/a.parquet", 1_017), "x" * 9_120)]
        (outcome,) = prompts.encode(rows, {})
        assert isinstance(outcome, Completion)
        assert outcome.error is not None
        assert outcome.error.message == ("row 1,017 of `b/a.parquet` has 9,120 tokens, limit 8,191")

    def test_case_M_odd_text_passes_and_broken_text_is_an_error_row(self, each: Model) -> None:
        values = ("a\0b", "👩‍👩‍👧 ok", "lone \ud83d", b"\xff\xfe", "ok", "<|im_end|>")
        expected = ["ok", "ok", "bad_text", "bad_text", "ok", "ok"]
        assert kinds(encode(each.raw, *values)) == expected
        assert kinds(encode(each.prompts(chat=True), *values)) == expected

    def test_case_M_broken_text_in_messages_is_an_error_row(self, model: Model) -> None:
        prompts = model.prompts(messages="m", chat=True)
        assert error_of(prompts, [{"role": "user", "content": "lone \udc00"}])[0] == "bad_text"
        assert error_of(prompts, b"\xff") == (
            "bad_text",
            "row 0 of `a.parquet` is not UTF-8: invalid start byte at byte 0",
        )

    def test_case_N_values_of_other_types(self, model: Model) -> None:
        assert kinds(encode(model.raw, 7, 1.5, ["a"], {"a": 1}, b"valid")) == ["bad_type"] * 5
        assert error_of(model.raw, 7)[1] == "row 0 of `a.parquet` is of type int, not text"

    @pytest.mark.parametrize(
        ("value", "kind", "words"),
        [
            ("hi", "bad_type", "is of type str, not a list of messages"),
            ('[{"role": "user"}]', "bad_type", "is of type str, not a list of messages"),
            (["hi"], "bad_type", "has as message 1 a str, not a role and content"),
            ([{"content": "hi"}], "bad_type", "has no role in message 1"),
            ([{"role": None, "content": "hi"}], "bad_type", "has no role in message 1"),
            ([], "empty_prompt", "has no messages"),
            (None, "null_prompt", "is null"),
        ],
    )
    def test_case_N_values_that_are_no_messages(
        self, model: Model, value: object, kind: str, words: str
    ) -> None:
        prompts = model.prompts(messages="m", chat=True)
        assert error_of(prompts, value) == (kind, f"row 0 of `a.parquet` {words}")

    def test_case_N_template_that_raises_says_its_own_message(self, model: Model) -> None:
        prompts = model.prompts(messages="m", chat=True)
        good = [{"role": "user", "content": "x"}]
        bad = [{"role": "bad", "content": "x"}]
        assert kinds(encode(prompts, good, bad, good)) == ["ok", "template_error", "ok"]
        kind, words = error_of(prompts, bad)
        assert kind == "template_error"
        assert "no role named bad here" in words

    def test_case_I_one_prompt_that_the_tokenizer_refuses_fails_alone(self, tmp_path: Path) -> None:
        # a vocabulary of whole words without an unknown token raises at any other word
        words = Tokenizer(models.WordLevel({"yes": 0, "no": 1, "<end>": 2}, unk_token="?"))
        PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>").save_pretrained(tmp_path)
        prompts = open_prompts(tmp_path)
        outcomes = encode(prompts, "yes", "maybe", None, "no")
        assert kinds(outcomes) == ["ok", "bad_text", "null_prompt", "ok"]
        assert [o.prompt for o in outcomes if isinstance(o, Request)] == [[0], [1]]

    @given(
        values=st.lists(
            st.none()
            | st.text(max_size=5)
            | st.binary(max_size=3)
            | st.integers()
            | st.lists(st.dictionaries(st.sampled_from(["role", "content"]), st.text(max_size=3)))
        ),
        kind=st.sampled_from(["prompt", "messages"]),
    )
    def test_case_I_any_values_give_as_many_outcomes_in_order(
        self, chat_prompts: dict[str, Prompts], values: list[object], kind: str
    ) -> None:
        outcomes = encode(chat_prompts[kind], *values)
        assert [outcome.id.index for outcome in outcomes] == list(range(len(values)))
        alone = [encode(chat_prompts[kind], value)[0] for value in values]
        assert kinds(outcomes) == kinds(alone)


@pytest.fixture(scope="module")
def chat_prompts(model: Model) -> dict[str, Prompts]:
    return {kind: model.prompts(**{kind: "c"}, chat=True) for kind in ("prompt", "messages")}


class TestConfiguration:
    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"chat": True}, "`input.chat = true` needs a chat template"),
            ({"messages": "m", "chat": "auto"}, "`input.messages` needs a chat template"),
            ({"system": "Be brief.", "chat": "auto"}, "`input.system` needs a chat template"),
        ],
    )
    def test_chat_without_template_is_refused(
        self, tmp_path: Path, changes: dict[str, Any], words: str
    ) -> None:
        folder = byte_level(tmp_path, template=None)
        with pytest.raises(ConfigError, match=words):
            open_prompts(folder, **changes)

    @pytest.mark.parametrize(
        "changes",
        [
            {"system": "Be brief."},
            {"prefill": "Yes"},
            {"tools": "t"},
            {"chat_template_kwargs": {"a": 1}},
        ],
    )
    def test_chat_switched_off_is_refused_where_it_is_needed(
        self, model: Model, changes: dict[str, Any]
    ) -> None:
        (key,) = changes
        with pytest.raises(ConfigError, match=f"`input.{key}` needs a chat template"):
            model.prompts(chat=False, **changes)

    def test_folder_without_tokenizer_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match="cannot load the tokenizer"):
            open_prompts(tmp_path)

    def test_description_is_json_and_follows_every_setting(self, model: Model) -> None:
        base = model.prompts(chat=True).describe()
        assert json.loads(json.dumps(base)) == base
        changes: list[dict[str, Any]] = [
            {"chat": False},
            {"system": "Be brief."},
            {"messages": "m"},
            {"template": "{{ a }}"},
            {"token_ids": "t"},
            {"prefill": "{{ a }}"},
            {"tools": "t"},
            {"params": "p"},
            {"too_long": "truncate_left"},
            {"chat_template_kwargs": {"a": 1}},
            {"logprobs": 2},
            {"top_k": 3},
            {"min_p": 0.1},
            {"n": 2},
            {"min_new_tokens": 2},
            {"repetition_penalty": 1.1},
            {"stop_on_repetition": 9},
            {"max_model_len": 999},
            {"job_seed": 1},
            {"seed": 1},
            {"max_new_tokens": 15},
            {"temperature": 0.5},
            {"top_p": 0.5},
            {"stop": ("x",)},
            {"stop_token_ids": (9,)},
            {"ignore_eos": True},
        ]
        seen = [base, *(model.prompts(**({"chat": True} | one)).describe() for one in changes)]
        assert len({json.dumps(one, sort_keys=True) for one in seen}) == len(seen)

    def test_description_follows_the_template(self, model: Model, tmp_path: Path) -> None:
        other = open_prompts(byte_level(tmp_path, template="{{ messages[0].content }}"), chat=True)
        assert (
            other.describe()["chat template"]
            != model.prompts(chat=True).describe()["chat template"]
        )


class TestSampling:
    def test_case_U_end_ids_of_all_three_places_end_the_text(self, tmp_path: Path) -> None:
        byte_level(tmp_path)
        (tmp_path / "generation_config.json").write_text('{"eos_token_id": [40, 41]}')
        (tmp_path / "config.json").write_text('{"model_type": "llama", "eos_token_id": 42}')
        prompts = open_prompts(tmp_path, stop_token_ids=(50,))
        assert request_of(prompts, "x").sampling.stop_ids == {2, 40, 41, 42, 50}
        assert prompts.describe()["end ids"] == [2, 40, 41, 42]

    def test_case_U_ignore_eos_leaves_the_stop_ids_of_the_job(self, model: Model) -> None:
        prompts = model.prompts(ignore_eos=True, stop_token_ids=(50,))
        assert request_of(prompts, "x").sampling.stop_ids == {50}

    def test_settings_reach_the_request(self, model: Model) -> None:
        prompts = model.prompts(temperature=0.5, top_p=0.25, stop=("a", "b"), max_new_tokens=3)
        sampling = request_of(prompts, "x").sampling
        assert (sampling.temperature, sampling.top_p, sampling.stop) == (0.5, 0.25, ("a", "b"))
        assert sampling.max_new_tokens == 3

    def test_draw_keys_differ_by_row_and_job_seed_and_nothing_else(self, model: Model) -> None:
        ids = [RowId(shard, index) for shard in ("a", "a1", "b") for index in (0, 1, 10, 11)]
        rows = [Row(row, "same text") for row in ids]
        keys = [
            outcome.sampling.draw_key
            for seed in (0, 1)
            for outcome in model.prompts(job_seed=seed).encode(rows, {})
            if isinstance(outcome, Request)
        ]
        assert len(set(keys)) == len(keys) == 24
        again = model.prompts(max_new_tokens=3).encode([replace(rows[3], value="other")], {})
        assert isinstance(again[0], Request)
        assert again[0].sampling.draw_key == keys[3]

    def test_seed_of_the_generation_table_is_one_key_for_all_rows(self, model: Model) -> None:
        rows = rows_of("a", "b")
        outcomes = [
            *model.prompts(seed=5, job_seed=0).encode(rows, {}),
            *model.prompts(seed=5, job_seed=1).encode(rows, {}),
            *model.prompts(seed=6).encode(rows[:1], {}),
        ]
        keys = [outcome.sampling.draw_key for outcome in outcomes if isinstance(outcome, Request)]
        assert keys[0] == keys[1] == keys[2] == keys[3] != keys[4]


class TestPromptText:
    def test_prompt_is_shown_with_its_special_tokens(self, model: Model) -> None:
        prompts = model.prompts(chat=True)
        assert prompts.prompt_text(request_of(prompts, "Hello 😀")) == (
            "<|im_start|>user\nHello 😀<|im_end|>\n<|im_start|>assistant\n"
        )


class TestText:
    @given(text=UTF8_TEXT)
    def test_text_survives_the_way_there_and_back(self, known: dict[str, Model], text: str) -> None:
        byte_level_model = known["byte_level"]
        tokens = byte_level_model.tokenizer(text)["input_ids"]
        assert text_of(byte_level_model.raw, tokens) == text

    def test_stop_id_is_not_part_of_the_text(self, model: Model) -> None:
        tokens = model.ids("ABC", "DEF", "<|im_end|>")
        assert text_of(model.raw, tokens, "stop") == "ABCDEF"
        by_word = model.prompts(stop_token_ids=model.ids("DEF"))
        assert text_of(by_word, tokens[:2], "stop") == "ABC"
        assert text_of(by_word, tokens[:2], "length") == "ABCDEF"

    def test_case_S_text_ends_before_the_stop_string(self, each: Model) -> None:
        prompts = each.prompts(stop=("DE", "F"))
        assert text_of(prompts, each.ids("ABC", "DEF"), "stop", "DE") == "ABC"
        assert text_of(prompts, each.ids("ABC", "D", "E"), "stop", "DE") == "ABC"
        assert text_of(prompts, each.ids("ABC", "DEF"), "length") == "ABCDEF"

    def test_case_T_emoji_is_whole_when_complete(self, each: Model) -> None:
        tokens = emoji_ids(each)
        assert len(tokens) == 4
        assert text_of(each.raw, [*each.ids("ABC"), *tokens, *each.ids("DEF")]) == "ABC😀DEF"

    @pytest.mark.parametrize("kept", [1, 2, 3])
    def test_case_T_emoji_cut_by_the_length_is_one_replacement(
        self, each: Model, kept: int
    ) -> None:
        whole = emoji_ids(each)
        assert text_of(each.raw, [*whole, *whole[:kept]]) == "😀\ufffd"
        assert text_of(each.raw, [*each.ids("ABC"), *whole[:kept]]) == "ABC\ufffd"

    def test_case_T_broken_bytes_spoil_nothing_beside_them(self, each: Model) -> None:
        whole = emoji_ids(each)
        assert text_of(each.raw, [*whole, *whole[:2], *whole]) == "😀\ufffd😀"

    @given(raw=st.binary(max_size=12))
    def test_case_T_any_bytes_decode_as_python_decodes_them(
        self, known: dict[str, Model], raw: bytes
    ) -> None:
        fallback = known["byte_fallback"]
        tokens = fallback.ids(*(f"<0x{byte:02X}>" for byte in raw))
        decoded = text_of(fallback.raw, tokens)
        # the decoder strips one space in front, as it does for text
        assert decoded == raw.decode(errors="replace").removeprefix(" ")

    def test_special_tokens_are_not_part_of_the_text(self, each: Model) -> None:
        tokens = each.ids("ABC", "<|im_start|>", "DEF")
        assert text_of(each.raw, tokens) == "ABCDEF"


def emoji_ids(model: Model) -> list[int]:
    """The four byte tokens of an emoji, without what a tokenizer puts in front."""
    ids: list[int] = model.tokenizer("😀", add_special_tokens=False)["input_ids"]
    return ids[-4:]


class TestStream:
    @examples(60)
    @given(data=st.data())
    def test_stream_gives_the_text_so_far_at_every_token(
        self, each: Model, data: st.DataObject
    ) -> None:
        pieces = st.sampled_from([" Hello", "world", "😀", "é", " ", "x", "  a", "ABCDEF"])
        whole = "".join(data.draw(st.lists(pieces, max_size=20)))
        tokens = each.tokenizer(whole)["input_ids"]
        stream = each.raw.open_text()
        so_far = ""
        for count, token in enumerate(tokens, start=1):
            so_far += stream.step(token)
            assert so_far == text_of(each.raw, tokens[:count]).removesuffix("\ufffd")

    @examples(60)
    @given(data=st.data())
    def test_stream_of_any_tokens_is_the_whole_text(self, each: Model, data: st.DataObject) -> None:
        known_ids = st.integers(0, len(each.tokenizer) + 3)
        tokens = data.draw(st.lists(known_ids, max_size=60))
        stream = each.raw.open_text()
        streamed = "".join(stream.step(token) for token in tokens)
        assert text_of(each.raw, tokens).removesuffix("\ufffd") == streamed

    def test_case_T_character_appears_with_its_last_byte(self, each: Model) -> None:
        stream = each.raw.open_text()
        tokens = [*each.ids("ABC"), *emoji_ids(each), *each.ids("DEF")]
        assert [stream.step(token) for token in tokens] == ["ABC", "", "", "", "😀", "DEF"]

    def test_case_S_stop_string_shows_before_an_unfinished_character(self, each: Model) -> None:
        stream = each.raw.open_text()
        tokens = [*each.ids("D"), *each.ids("E"), *emoji_ids(each)[:2]]
        assert "".join(stream.step(token) for token in tokens) == "DE"


def test_case_T_the_tail_of_the_prompt_never_leaks_into_the_output(tmp_path: Path) -> None:
    prompts = open_prompts(byte_level(tmp_path / "model", template=None))
    # the prompt ends in the middle of the emoji, the output brings its other bytes
    rest = request_of(prompts, "😀").prompt[1:]
    text = prompts.text(Completion(RowId("a", 0), rest, "length"))
    assert set(text) == {"\ufffd"}
