"""Result files say where they come from, and nothing of who made them or when."""

import json

import pytest

from jobrunner.config import Settings
from jobrunner.data.results.outcomes import extras_of
from jobrunner.data.results.provenance import provenance_of

FINGERPRINT = {
    "input shard `a`": {"size": 1},
    "model file `model.safetensors`": "1:aa",
    "model file `tokenizer.json`": "2:bb",
    "generation.seed": None,
}


def settings(**tables):
    return Settings.model_validate(
        {
            "input": {"path": "in", "prompt": "x"},
            "output": {"path": "run"},
            "model": {"name": "tiny"},
        }
        | tables
    )


def test_provenance_is_plain_json_with_settings_and_effective_values():
    said = provenance_of("1.0", settings(), FINGERPRINT, {"temperature": 0.7})
    assert json.loads(json.dumps(said)) == said
    assert (said["version"], said["model"]) == ("1.0", "tiny")
    assert said["generation"] == {"temperature": 0.7}
    assert said["settings"]["input"]["path"] == "in"
    assert "folder" not in said["settings"]


@pytest.mark.parametrize(
    ("key", "changed"),
    [
        ("input shard `a`", {"job", "input"}),
        ("model file `model.safetensors`", {"job", "model"}),
        ("model file `tokenizer.json`", {"job", "model", "tokenizer"}),
        ("generation.seed", {"job"}),
    ],
)
def test_a_fingerprint_changes_with_what_it_stands_for(key, changed):
    before = provenance_of("1.0", settings(), FINGERPRINT, {})["fingerprints"]
    after = provenance_of("1.0", settings(), FINGERPRINT | {key: "other"}, {})["fingerprints"]
    assert {name for name in before if before[name] != after[name]} == changed


def test_nothing_of_the_environment_gets_into_provenance(monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "hunter2")
    assert "hunter2" not in json.dumps(provenance_of("1.0", settings(), FINGERPRINT, {}))


@pytest.mark.parametrize(
    ("tables", "extras"),
    [
        ({}, ()),
        ({"generation": {"n": 2}}, ("samples",)),
        ({"input": {"path": "in", "prompt": "x", "params": ("p",)}}, ("samples",)),
        (
            {"input": {"path": "in", "prompt": "x", "too_long": "truncate_left"}},
            ("truncated_tokens",),
        ),
        ({"output": {"path": "run", "logprobs": 0}}, ("logprobs",)),
        (
            {"output": {"path": "run", "columns": ("chunks", "token_ids"), "logprobs": 3}},
            ("token_ids", "logprobs", "chunks"),
        ),
    ],
)
def test_settings_decide_which_columns_results_have(tables, extras):
    assert extras_of(settings(**tables)) == extras
