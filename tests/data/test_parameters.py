"""Parameters per row and the defaults of the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jobrunner.data.prompts.parameters import ROW_PARAMETERS
from jobrunner.data.prompts.prompts import Prompts
from jobrunner.errors import ConfigError, ModelError
from jobrunner.records import Completion, Partial, Request, Row, RowId, SampleId, TokenLogprob
from tests.prompt_jobs import kinds, only_error, only_request, open_prompts, outcomes_of
from tests.tiny_tokenizers import byte_level


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_level(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def by_struct(folder: Path) -> Prompts:
    return open_prompts(folder, params="how", temperature=0.5, min_new_tokens=2)


EVERY: dict[str, object] = {
    "temperature": 1,
    "top_p": 0.5,
    "top_k": 4,
    "min_p": 0.1,
    "repetition_penalty": 1.5,
    "presence_penalty": -1.0,
    "frequency_penalty": 2.0,
    "max_new_tokens": 9,
    "min_new_tokens": 3,
    "stop": ["a", "b"],
    "stop_token_ids": [7],
    "seed": 5,
    "n": 2,
    "ignore_eos": True,
}


def test_every_parameter_of_a_row_reaches_its_requests(by_struct: Prompts) -> None:
    assert EVERY.keys() == set(ROW_PARAMETERS)
    first, second = outcomes_of(by_struct, {"p": "x", "how": EVERY})
    assert isinstance(first, Request)
    assert isinstance(second, Request)
    sampling = first.sampling
    for name in ROW_PARAMETERS[:9]:
        assert getattr(sampling, name) == EVERY[name], name
    assert (sampling.stop, sampling.stop_ids) == (("a", "b"), {7})
    assert [(r.sample, r.samples) for r in (first, second)] == [(0, 2), (1, 2)]
    assert first.sampling.draw_key != second.sampling.draw_key


@pytest.mark.parametrize(
    "value",
    [
        {"temperature": 1.0, "top_p": None},
        '{"temperature": 1.0, "top_p": null}',
        [("temperature", 1.0)],
    ],
)
def test_struct_json_and_map_change_what_they_name(by_struct: Prompts, value: object) -> None:
    sampling = only_request(outcomes_of(by_struct, {"p": "x", "how": value})).sampling
    assert (sampling.temperature, sampling.top_p, sampling.min_new_tokens) == (1.0, 1.0, 2)


@pytest.mark.parametrize("value", [None, {}, "null", "{}", {"top_p": None}])
def test_null_leaves_the_values_of_the_job(by_struct: Prompts, value: object) -> None:
    plain = only_request(outcomes_of(by_struct, {"p": "x", "how": None}))
    assert only_request(outcomes_of(by_struct, {"p": "x", "how": value})) == plain


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (
            {"temperature": -1},
            "has in `how` `temperature` = -1: must be greater than or equal to 0",
        ),
        ({"top_p": 0}, "has in `how` `top_p` = 0: must be greater than 0"),
        ({"top_p": True}, "has in `how` `top_p` = True: must be a valid number"),
        (
            {"max_new_tokens": 0},
            "has in `how` `max_new_tokens` = 0: must be greater than or equal to 1",
        ),
        (
            {"max_new_tokens": 1},
            "has in `how` `min_new_tokens` 2 is over `max_new_tokens` 1",
        ),
        (
            {"temprature": 1},
            "has in `how` the unknown parameter 'temprature': did you mean `temperature`?"
            f" a row can set {', '.join(ROW_PARAMETERS)}",
        ),
        ({"stop": ""}, "has in `how` `stop` = '': String should have at least 1 character"),
        ([1], "has in `how` a list, not parameters by name"),
        ("7", "has in `how` a int, not parameters by name"),
        ("{", None),
        ({"n": 10**9}, "has in `how` `n` = 1000000000: must be less than or equal to 1024"),
    ],
)
def test_case_Q_bad_parameters_are_an_error_row(
    by_struct: Prompts, value: object, words: str | None
) -> None:
    kind, message = only_error(outcomes_of(by_struct, {"p": "x", "how": value}))
    assert kind == "bad_params"
    assert words is None or message == words


def test_case_Q_stop_token_beyond_the_vocabulary_names_the_limit(by_struct: Prompts) -> None:
    error = only_error(outcomes_of(by_struct, {"p": "x", "how": {"stop_token_ids": [9999]}}))
    last = by_struct._tokenizer.vocabulary - 1
    words = f"has in `how` `stop_token_ids` = 9,999: the model's last token is {last}"
    assert error == ("bad_params", words)


def test_stop_token_of_the_job_beyond_the_vocabulary_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"`generation.stop_token_ids` = 9,999: the model's"):
        open_prompts(folder, stop_token_ids=(9_999,))


def test_case_Q_rows_beside_a_bad_one_are_good(by_struct: Prompts) -> None:
    values = [{"n": 2}, {"top_p": 0}, None]
    records = [{"p": "x", "how": value} for value in values]
    assert kinds(outcomes_of(by_struct, *records)) == ["ok", "ok", "bad_params", "ok"]


class TestNamedColumns:
    @pytest.mark.parametrize(
        ("given", "expected"),
        [
            ("0.7", 0.7),
            ("1", 1.0),
            (0.7, 0.7),
            (1, 1.0),
            ("", 0.0),
            (None, 0.0),
        ],
    )
    def test_numbers_may_be_text(self, folder: Path, given: object, expected: float) -> None:
        prompts = open_prompts(folder, params=["temperature"])
        request = only_request(outcomes_of(prompts, {"p": "x", "temperature": given}))
        assert request.sampling.temperature == expected

    @pytest.mark.parametrize(("given", "expected"), [("3", 3), (3.0, 3), ("3.0", 3)])
    def test_whole_numbers_may_be_floats(self, folder: Path, given: object, expected: int) -> None:
        prompts = open_prompts(folder, params="max_new_tokens")
        request = only_request(outcomes_of(prompts, {"p": "x", "max_new_tokens": given}))
        assert request.sampling.max_new_tokens == expected

    @pytest.mark.parametrize(
        ("given", "expected"),
        [("a", ("a",)), ("7", ("7",)), ('["a", "b"]', ("a", "b")), (["a"], ("a",)), ("", ())],
    )
    def test_stop_is_text_or_a_list(
        self, folder: Path, given: object, expected: tuple[str, ...]
    ) -> None:
        prompts = open_prompts(folder, params="stop")
        request = only_request(outcomes_of(prompts, {"p": "x", "stop": given}))
        assert request.sampling.stop == expected

    @pytest.mark.parametrize("given", ["hot", "1.5.2", "[1]", float("nan"), 2.5])
    def test_case_Q_bad_value_names_its_column(self, folder: Path, given: object) -> None:
        prompts = open_prompts(folder, params=["max_new_tokens"])
        kind, words = only_error(outcomes_of(prompts, {"p": "x", "max_new_tokens": given}))
        assert kind == "bad_params"
        assert words.startswith("has in its columns `max_new_tokens` = ")

    def test_column_that_is_no_parameter_is_refused(self, folder: Path) -> None:
        with pytest.raises(ConfigError, match="names column `heat`, which is no parameter"):
            open_prompts(folder, params=["temperature", "heat"])


class TestDrawKeys:
    def test_seed_of_a_row_keys_its_draws_by_itself(self, folder: Path) -> None:
        prompts = open_prompts(folder, params="seed")
        other = open_prompts(folder, params="seed", job_seed=9)
        records = [{"p": "x", "seed": seed} for seed in (5, 5, 6, None, None)]
        keys = [
            o.sampling.draw_key for o in outcomes_of(prompts, *records) if isinstance(o, Request)
        ]
        again = [
            o.sampling.draw_key for o in outcomes_of(other, *records) if isinstance(o, Request)
        ]
        assert keys[0] == keys[1] == again[0]
        assert len(set(keys)) == 4
        assert keys[3] != again[3]

    def test_samples_of_a_row_have_keys_of_their_own(self, folder: Path) -> None:
        outcomes = outcomes_of(open_prompts(folder, n=3, seed=1), {"p": "x"})
        assert len({o.sampling.draw_key for o in outcomes if isinstance(o, Request)}) == 3


def test_each_sample_goes_on_from_its_own_tokens(folder: Path) -> None:
    row = Row(RowId("a", 0), "x")
    chosen = (TokenLogprob(8, -0.5),)
    saved = {SampleId(row.id, 1): Partial(row.id, (8,), attempt=1, sample=1, logprobs=chosen)}
    first, second = open_prompts(folder, n=2, logprobs=0).encode([row], saved)
    assert isinstance(first, Request)
    assert isinstance(second, Request)
    assert (first.output, first.attempt, first.logprobs) == ((), 1, ())
    assert (second.output, second.attempt, second.logprobs) == ((8,), 2, chosen)


def test_row_with_an_error_stays_one_error(folder: Path) -> None:
    outcomes = outcomes_of(open_prompts(folder, n=3), {"p": None})
    assert kinds(outcomes) == ["null_prompt"]
    assert isinstance(outcomes[0], Completion)


def test_text_ends_before_the_stop_string_of_the_row(folder: Path) -> None:
    prompts = open_prompts(folder, params="stop")
    request = only_request(outcomes_of(prompts, {"p": "x", "stop": "DE"}))
    tokens = prompts._tokenizer.loaded.convert_tokens_to_ids(["ABC", "DEF"])
    end = Completion(request.id, tokens, "stop", stop_string="DE", request=request)
    assert prompts.text(end) == "ABC"


def test_stop_string_passed_over_for_the_least_tokens_stays(folder: Path) -> None:
    prompts = open_prompts(folder, stop="DE", min_new_tokens=1)
    request = only_request(outcomes_of(prompts, {"p": "x"}))
    tokens = prompts._tokenizer.loaded.convert_tokens_to_ids(["DEF", "ABC", "DEF"])
    end = Completion(request.id, tokens, "stop", stop_string="DE", request=request)
    assert prompts.text(end) == "DEFABC"


class TestModelDefaults:
    def test_case_U_defaults_apply_only_when_asked_for(self, tmp_path: Path) -> None:
        byte_level(tmp_path)
        defaults = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20}
        (tmp_path / "generation_config.json").write_text(json.dumps(defaults))
        plain = open_prompts(tmp_path)
        asked = open_prompts(tmp_path, use_model_defaults=True, top_p=0.5)
        names = ("temperature", "top_p", "top_k", "max_new_tokens")
        assert [plain.effective[name] for name in names] == [0.0, 1.0, 0, 16]
        assert [asked.effective[name] for name in names] == [0.6, 0.5, 20, 16]
        assert asked.describe()["generation.top_k"] == 20
        sampling = only_request(outcomes_of(asked, {"p": "x"})).sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.6, 0.5, 20)

    @pytest.mark.parametrize(
        ("config", "temperature"),
        [
            ({"do_sample": False, "temperature": 0.6}, 0.0),
            ({"do_sample": True}, 1.0),
            ({"temperature": 0.6}, 0.6),
            ({"temperature": None}, 0.0),
            ({}, 0.0),
        ],
    )
    def test_case_U_temperature_follows_do_sample(
        self, tmp_path: Path, config: dict[str, object], temperature: float
    ) -> None:
        byte_level(tmp_path)
        (tmp_path / "generation_config.json").write_text(json.dumps(config))
        prompts = open_prompts(tmp_path, use_model_defaults=True)
        assert prompts.effective["temperature"] == temperature

    @pytest.mark.parametrize("content", ["[]", "null", "{", "[" * 100_000])
    def test_a_file_that_is_no_object_is_refused_by_name(
        self, tmp_path: Path, content: str
    ) -> None:
        byte_level(tmp_path)
        (tmp_path / "generation_config.json").write_text(content)
        with pytest.raises(ModelError, match=r"cannot read `.*generation_config\.json`"):
            open_prompts(tmp_path)

    def test_invalid_defaults_are_refused_with_the_file(self, tmp_path: Path) -> None:
        byte_level(tmp_path)
        (tmp_path / "generation_config.json").write_text('{"top_p": 7}')
        with pytest.raises(
            ConfigError, match=r"generation_config.json` has defaults .* `top_p` = 7"
        ):
            open_prompts(tmp_path, use_model_defaults=True)
