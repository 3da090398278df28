"""Templates over columns, chat templates of one's own, tools, prefills."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from jobrunner.config import InputTable
from jobrunner.data.prompts.templates import needed_columns
from jobrunner.errors import ConfigError
from tests.prompt_jobs import only_error, only_request, open_prompts, outcomes_of, request_of
from tests.tiny_tokenizers import byte_level, double_bos


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_level(tmp_path_factory.mktemp("models"))


def rendered(folder: Path, template: str, /, **columns: object) -> str:
    prompts = open_prompts(folder, template=template)
    return prompts.prompt_text(only_request(outcomes_of(prompts, columns)))


def failure(folder: Path, template: str, /, **columns: object) -> tuple[str, str]:
    return only_error(outcomes_of(open_prompts(folder, template=template), columns))


class TestNeededColumns:
    def test_variables_of_templates_parameters_and_tools_are_needed_once_each(self) -> None:
        table = InputTable(
            path="a",
            template="{{ b }}{% for x in a %}{{ x }}{{ c.d }}{% endfor %}{{ range(2) }}",
            prefill="{{ b }}{{ e }}",
            params="p",
            tools="t",
        )
        assert sorted(needed_columns(table)) == ["a", "b", "c", "e", "p", "t"]

    def test_column_of_prompts_is_among_them_where_it_serves_for_those_too(self) -> None:
        table = InputTable(path="a", prompt="q", prefill="{{ q }}: {{ r }}")
        assert needed_columns(table) == ("q", "r")
        assert needed_columns(InputTable(path="a", prompt="q", prefill="{{ r }}")) == ("r",)

    @pytest.mark.parametrize("key", ["template", "prefill"])
    def test_template_that_is_none_is_refused_with_its_line(self, key: str) -> None:
        source: dict[str, Any] = {"prompt": "q"} if key == "prefill" else {}
        with pytest.raises(ConfigError, match=f"`input.{key}` is not a template: .* line 2"):
            needed_columns(InputTable(path="a", **{key: "a\n{{ b"}, **source))


class TestColumns:
    def test_columns_are_variables(self, folder: Path) -> None:
        template = "Q: {{ q.text }} {{ n + 1 }}{% for x in xs %} {{ x }}{% endfor %}\n"
        assert rendered(folder, template, q={"text": "<hi>"}, n=1, xs=["a", "b"]) == (
            "Q: <hi> 2 a b\n"
        )

    def test_rendered_text_goes_through_the_chat_template(self, folder: Path) -> None:
        by_template = open_prompts(folder, template="Say {{ a }}", chat=True)
        by_prompt = open_prompts(folder, chat=True)
        found = only_request(outcomes_of(by_template, {"a": "x"})).prompt
        assert found == request_of(by_prompt, "Say x").prompt

    @pytest.mark.parametrize(
        ("template", "name"),
        [
            ("{{ a }}", "`a`"),
            ("{{ a | upper }}", "`a`"),
            ("{{ 'x' ~ a }}", "`a`"),
            ("{{ [a] | join }}", "`a`"),
            ("{{ '%s' % a }}", "`a`"),
            ("{{ b.c }}", "`b`.c"),
            ("{{ none }}", "a null"),
            ("{{ b }}", "`b`.c"),
            ("{{ [1, a] }}", "`a`"),
            ("{{ 'x' ~ b }}", "`b`.c"),
        ],
    )
    def test_case_N_printed_null_is_an_error_row(
        self, folder: Path, template: str, name: str
    ) -> None:
        kind, words = failure(folder, template, a=None, b={"c": None})
        assert kind == "template_error"
        assert words.startswith("makes `input.template` fail: it prints ")
        assert name in words

    @pytest.mark.parametrize(
        "template",
        [
            "{{ a or 'nothing' }}",
            "{% if a is none %}nothing{% endif %}",
            "{% if a == none %}nothing{% endif %}",
            "{{ a | default('nothing', true) }}",
            "{{ 'nothing' if not a }}",
            "{{ {'a': a} | tojson | replace('{\"a\": null}', 'nothing') }}",
        ],
    )
    def test_null_may_be_asked_about(self, folder: Path, template: str) -> None:
        assert rendered(folder, template, a=None) == "nothing"

    @pytest.mark.parametrize(
        ("template", "words"),
        [
            ("{{ a.__class__ }}", "is unsafe"),
            ("{{ range(10**6) | list }}", "Range too big"),
            ("{{ 'x' * 10**9 }}", "repeats a value beyond"),
            ("{{ 9 ** 99999 }}", "a power"),
            ("{{ a.missing }}", "has no attribute 'missing'"),
            ("{{ a[0].append(1) }}", "is unsafe"),
            # their spelling would be another one in every run
            ("{{ a.count }}", "prints a function"),
            ("{{ a | map('string') }}", "prints a function"),
        ],
    )
    def test_template_can_do_nothing_beyond_its_bounds(
        self, folder: Path, template: str, words: str
    ) -> None:
        kind, message = failure(folder, template, a=[[]])
        assert kind == "template_error"
        assert words in message

    @pytest.mark.parametrize("template", ["{{ lipsum() }}", "{{ [1, 2] | random }}"])
    def test_nothing_random_can_be_in_a_template(self, folder: Path, template: str) -> None:
        if "random" in template:
            with pytest.raises(ConfigError, match="No filter named 'random'"):
                open_prompts(folder, template=template)
        else:
            assert needed_columns(InputTable(path="a", template=template)) == ("lipsum",)

    def test_long_output_is_an_error_row(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("jobrunner.data.prompts.templates.MOST_CHARACTERS", 10)
        template = "{% for i in range(a) %}x{% endfor %}"
        assert rendered(folder, template, a=10) == "x" * 10
        assert "over 10 characters" in failure(folder, template, a=11)[1]

    def test_case_M_broken_text_in_a_column_is_an_error_row(self, folder: Path) -> None:
        assert failure(folder, "{{ a }}", a=b"\xff") == (
            "bad_text",
            "has in column `a` what is not UTF-8: invalid start byte at byte 0",
        )
        assert failure(folder, "some {{ a }}", a="x\ud800") == (
            "bad_text",
            "has a lone surrogate at character 1",
        )

    def test_case_J_template_that_gives_nothing_is_an_empty_prompt(self, folder: Path) -> None:
        assert failure(folder, "{{ a }}", a="") == ("empty_prompt", "yields no tokens")
        chat = open_prompts(folder, template="{{ a }}", chat=True)
        assert only_error(outcomes_of(chat, {"a": ""})) == ("empty_prompt", "is empty")

    def test_case_R_template_that_writes_the_bos_of_the_tokenizer_gives_one(
        self, tmp_path: Path
    ) -> None:
        prompts = open_prompts(double_bos(tmp_path), template="<|bos|>{{ a }}")
        assert only_request(outcomes_of(prompts, {"a": "x"})).prompt.count(0) == 1


class TestTokenIds:
    def test_token_ids_are_used_as_they_are(self, tmp_path: Path) -> None:
        prompts = open_prompts(double_bos(tmp_path), token_ids="t", chat="auto")
        assert request_of(prompts, [5, 1, 7]).prompt == [5, 1, 7]

    @pytest.mark.parametrize("odd", [-1, 10**6, 1.0, True, "x", None])
    def test_odd_token_is_an_error_row_with_place_and_limit(
        self, folder: Path, odd: object
    ) -> None:
        prompts = open_prompts(folder, token_ids="t")
        kind, words = only_error(outcomes_of(prompts, {"p": [5, odd]}))
        assert kind == "bad_type"
        assert words.startswith(f"has {odd!r} at place 1, which is no token id: ")
        assert words.endswith(f"from 0 to {prompts._tokenizer.vocabulary - 1}")

    @pytest.mark.parametrize(
        ("value", "kind"), [([], "empty_prompt"), (None, "null_prompt"), ("1 2", "bad_type")]
    )
    def test_no_list_of_tokens_is_an_error_row(
        self, folder: Path, value: object, kind: str
    ) -> None:
        prompts = open_prompts(folder, token_ids="t")
        assert only_error(outcomes_of(prompts, {"p": value}))[0] == kind

    def test_limit_is_that_of_the_model(self, tmp_path: Path) -> None:
        byte_level(tmp_path)
        (tmp_path / "config.json").write_text('{"vocab_size": 5000, "model_type": "llama"}')
        prompts = open_prompts(tmp_path, token_ids="t")
        assert request_of(prompts, [4999]).prompt == [4999]
        assert only_error(outcomes_of(prompts, {"p": [5000]}))[0] == "bad_type"

    def test_token_that_the_model_does_not_know_is_an_error_row(self, tmp_path: Path) -> None:
        byte_level(tmp_path)
        (tmp_path / "config.json").write_text('{"vocab_size": 100, "model_type": "llama"}')
        prompts = open_prompts(tmp_path)
        kind, words = only_error(outcomes_of(prompts, {"p": "Hello"}))
        assert (kind, words[-28:]) == ("bad_text", ", the model's last one is 99")


class TestChat:
    def test_template_of_the_job_replaces_that_of_the_model(self, tmp_path: Path) -> None:
        (tmp_path / "own.jinja").write_text("[{{ messages[0].content }}]{{ mood }}")
        prompts = open_prompts(
            byte_level(tmp_path / "model"),
            chat="auto",
            chat_template="own.jinja",
            chat_template_kwargs={"mood": "!"},
            base=tmp_path,
        )
        assert prompts.prompt_text(request_of(prompts, "x")) == "[x]!"

    def test_template_of_the_job_makes_a_model_without_one_chat(self, tmp_path: Path) -> None:
        (tmp_path / "own.jinja").write_text("[{{ messages[0].content }}]")
        bare = byte_level(tmp_path / "model", template=None)
        prompts = open_prompts(bare, chat="auto", chat_template="own.jinja", base=tmp_path)
        assert prompts.prompt_text(request_of(prompts, "x")) == "[x]"

    def test_template_that_is_no_file_is_refused(self, folder: Path, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"`input.chat_template` is no file: .*own.jinja"):
            open_prompts(folder, chat=True, chat_template="own.jinja", base=tmp_path)

    def test_template_that_is_none_is_refused(self, folder: Path, tmp_path: Path) -> None:
        (tmp_path / "own.jinja").write_text("{% if %}")
        with pytest.raises(ConfigError, match=r"`input.chat_template` is not a template: .*line 1"):
            open_prompts(folder, chat=True, chat_template="own.jinja", base=tmp_path)

    @pytest.mark.parametrize("name", ["tokenize", "tools", "messages", "add_generation_prompt"])
    def test_arguments_that_are_not_the_template_s_are_refused(
        self, folder: Path, name: str
    ) -> None:
        with pytest.raises(ConfigError, match=f"`input.chat_template_kwargs` cannot set `{name}`"):
            open_prompts(folder, chat=True, chat_template_kwargs={name: 1})

    def test_description_follows_the_template_file(self, folder: Path, tmp_path: Path) -> None:
        seen = set()
        for text in ("{{ messages[0].content }}", "x{{ messages[0].content }}"):
            (tmp_path / "own.jinja").write_text(text)
            prompts = open_prompts(folder, chat=True, chat_template="own.jinja", base=tmp_path)
            seen.add(json.dumps(prompts.describe()))
        assert len(seen) == 2

    def test_last_message_of_the_assistant_goes_on(self, folder: Path) -> None:
        prompts = open_prompts(folder, messages="m", chat=True)
        turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "It is"}]
        text = prompts.prompt_text(request_of(prompts, turns))
        assert text == "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\nIt is"

    @pytest.mark.parametrize("spelled", ["", "<|im_end|>"])
    def test_prefill_begins_the_answer(self, folder: Path, spelled: str) -> None:
        prompts = open_prompts(folder, chat=True, prefill="{{ a }} is {{ p }}")
        request = only_request(outcomes_of(prompts, {"p": "x", "a": spelled}))
        text = "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
        assert prompts.prompt_text(request) == f"{text}{spelled} is x"
        assert list(request.prompt).count(2) == 1


TOOL: dict[str, object] = {"name": "add", "strict": None}


# a date that only Arrow can hold comes as its scalar
BEYOND_PYTHON = pa.scalar(2**30, pa.int32()).cast(pa.date32())


class TestTools:
    TEMPLATE = "{{ tools | tojson }}{{ messages[0].content }}"

    @pytest.fixture
    def prompts(self, tmp_path: Path) -> Any:
        return open_prompts(byte_level(tmp_path, template=self.TEMPLATE), chat=True, tools="t")

    @pytest.mark.parametrize(
        ("tools", "text"),
        [
            ([TOOL], '[{"name": "add"}]x'),
            (json.dumps([TOOL]), '[{"name": "add", "strict": null}]x'),
            (None, "nullx"),
            ([], "nullx"),
        ],
    )
    def test_tools_of_a_row_reach_the_template(
        self, prompts: Any, tools: object, text: str
    ) -> None:
        assert prompts.prompt_text(only_request(outcomes_of(prompts, {"p": "x", "t": tools}))) == (
            text
        )

    @pytest.mark.parametrize(
        "tools", ["{", "7", [1], {"name": "add"}, "[" * 900 + "]" * 900, BEYOND_PYTHON]
    )
    def test_what_is_no_list_of_tools_is_an_error_row(self, prompts: Any, tools: object) -> None:
        kind, words = only_error(outcomes_of(prompts, {"p": "x", "t": tools}))
        assert kind == "bad_type"
        assert words.startswith("has in column `t` ")
