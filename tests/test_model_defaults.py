"""What a model says of itself in its own files: where texts end, and how it wants to be sampled."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from jobrunner.data.results.parts import FOOTER_KEY
from jobrunner.errors import MismatchError
from tests.tiny_jobs import answers, write_parquet

INPUT = {"path": "in", "prompt": "prompt", "chat": False}
DEFAULTS = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9}


@pytest.fixture
def model(tmp_path: Path, tiny_model: Path) -> Path:
    """A model of which each test may say what it likes."""
    write_parquet(tmp_path / "in/a.parquet", prompt=[f"({index})" for index in range(6)])
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def say(model: Path, name: str, **values: Any) -> None:
    """Change values of one of a model's files."""
    known = json.loads((model / name).read_text())
    (model / name).write_text(json.dumps(known | values))


def answered(folder: Path, model: Path, run: str, **generation: Any) -> list[list[int]]:
    tables = {
        "input": INPUT,
        "output": {"columns": ["token_ids"]},
        "generation": {"max_new_tokens": 16, **generation},
    }
    return [row["token_ids"] for row in answers(folder, model, tables, run)]


def stored(folder: Path, run: str) -> dict[str, Any]:
    """The generation values that a result file says it was made with."""
    metadata = pq.read_metadata(folder / run / "results/a.parquet").metadata
    generation: dict[str, Any] = json.loads(metadata[FOOTER_KEY])["generation"]
    return {key: generation[f"generation.{key}"] for key in ("temperature", "top_k", "top_p")}


def cut(tokens: list[int], ends: set[int]) -> list[int]:
    """Tokens up to and with the first end."""
    places = [place for place, token in enumerate(tokens) if token in ends]
    return tokens[: places[0] + 1] if places else tokens


def test_case_U_end_ids_of_both_places_end_a_text_but_with_ignore_eos(
    tmp_path: Path, model: Path
) -> None:
    whole = answered(tmp_path, model, "whole", ignore_eos=True)
    one, other = whole[0][3], whole[1][7]
    assert one != other
    say(model, "generation_config.json", eos_token_id=[one])
    spelled = AutoTokenizer.from_pretrained(model).convert_ids_to_tokens(other)
    say(model, "tokenizer_config.json", eos_token=spelled)
    ended = answered(tmp_path, model, "ended")
    # config.json still names token 2
    assert ended == [cut(tokens, {one, other, 2}) for tokens in whole]
    assert {tokens[-1] for tokens in ended} >= {one, other}
    assert answered(tmp_path, model, "ignored", ignore_eos=True) == whole


def test_case_U_sampling_defaults_apply_and_are_told_only_when_asked_for(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = answered(tmp_path, model, "before")
    say(model, "generation_config.json", **DEFAULTS)
    caplog.set_level("INFO", "cbjob")
    assert answered(tmp_path, model, "plain") == before
    assert "temperature 0.0, top_p 1.0, top_k 0" in caplog.text
    assert stored(tmp_path, "plain") == {"temperature": 0.0, "top_k": 0, "top_p": 1.0}
    caplog.clear()
    asked = answered(tmp_path, model, "asked", use_model_defaults=True, top_p=0.5)
    assert asked != before
    # what the job says itself goes before
    assert "temperature 0.7, top_p 0.5, top_k 20" in caplog.text
    assert stored(tmp_path, "asked") == {"temperature": 0.7, "top_k": 20, "top_p": 0.5}
    same = answered(tmp_path, model, "same", temperature=0.7, top_p=0.5, top_k=20)
    assert same == asked


def test_case_U_a_resume_with_other_defaults_is_refused_with_both_values(
    tmp_path: Path, model: Path
) -> None:
    say(model, "generation_config.json", **DEFAULTS)
    answered(tmp_path, model, "run", use_model_defaults=True)
    say(model, "generation_config.json", temperature=0.2)
    with pytest.raises(MismatchError, match=r"generation\.temperature: 0\.7 then, 0\.2 now"):
        answered(tmp_path, model, "run", use_model_defaults=True)
