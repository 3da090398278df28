"""Whole jobs on a tiny real model whose rows are wrong, or look it: each is answered or explained.

The tokenizer of the tiny model adds no BOS and spells bytes: `"x" * 28` has 28 tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from jobrunner.commands.check import examine
from jobrunner.errors import ConfigError
from tests.tiny_jobs import answers, kinds, settings_of, write_parquet

PROMPT = {"path": "in", "prompt": "prompt", "chat": False}
CHAT = {"path": "in", "prompt": "prompt", "chat": True}


def finish(rows: list[dict[str, Any]]) -> list[tuple[str | None, int]]:
    return [(row["finish_reason"], row["output_tokens"]) for row in rows]


@pytest.mark.parametrize("table", [PROMPT, CHAT], ids=["raw", "chat"])
def test_case_J_empty_null_and_blank_prompts(
    tmp_path: Path, tiny_model: Path, table: dict[str, Any]
) -> None:
    write_parquet(tmp_path / "in/a.parquet", prompt=["ok", "", None, "   "])
    rows = answers(tmp_path, tiny_model, {"input": table})
    assert kinds(rows) == ["ok", "empty_prompt", "null_prompt", "ok"]
    assert [row["text"] is None for row in rows] == [False, True, True, False]
    assert rows[3]["output_tokens"] > 0
    # nothing was put in front of the prompt
    assert table is CHAT or rows[0]["prompt_tokens"] == len("ok")


LONG = ["x" * length for length in (28, 29, 31, 32, 40)]


def test_case_K_new_tokens_are_cut_to_the_room_that_is_left(
    tmp_path: Path, tiny_model: Path
) -> None:
    write_parquet(tmp_path / "in/a.parquet", prompt=LONG)
    tables = {
        "input": PROMPT,
        "model": {"max_model_len": 32},
        "generation": {"max_new_tokens": 4, "ignore_eos": True},
    }
    rows = answers(tmp_path, tiny_model, tables)
    assert kinds(rows) == ["ok", "ok", "ok", "prompt_too_long", "prompt_too_long"]
    assert finish(rows) == [("length", 4), ("length", 3), ("length", 1), (None, 0), (None, 0)]
    assert [row["prompt_tokens"] for row in rows] == [28, 29, 31, 32, 40]
    assert rows[4]["error"] == "row 4 of `a.parquet` has 40 tokens, limit 31"


@pytest.mark.parametrize("chat", [False, True])
def test_case_K_truncate_left_cuts_what_users_wrote_and_no_template(
    tmp_path: Path, tiny_model: Path, chat: bool
) -> None:
    frame = len("<user\n>\n<assistant\n") if chat else 0
    write_parquet(tmp_path / "in/a.parquet", prompt=["y" * 9 + text[9:] for text in LONG])
    tables = {
        "input": {**PROMPT, "chat": chat, "too_long": "truncate_left"},
        "output": {"columns": ["prompt_text"]},
        "model": {"max_model_len": 32 + frame},
        "generation": {"max_new_tokens": 4, "ignore_eos": True},
    }
    rows = answers(tmp_path, tiny_model, tables)
    assert finish(rows) == [("length", 4)] * 5
    assert [row["truncated_tokens"] for row in rows] == [0, 1, 3, 4, 12]
    assert {row["prompt_tokens"] for row in rows} == {28 + frame}
    kept = ["y" * (9 - cut) + "x" * (19 + cut) for cut in (0, 1, 3, 4, 9)]
    before, after = ("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n")
    shown = [before + text + after for text in kept] if chat else kept
    assert [row["prompt_text"] for row in rows] == shown


def test_case_L_a_prompt_that_fits_the_model_but_not_the_kv_memory_cannot_fit(
    tmp_path: Path, tiny_model: Path
) -> None:
    write_parquet(tmp_path / "in/a.parquet", prompt=["short", "x" * 1_500, "short too"])
    rows = answers(tmp_path, tiny_model, {"input": PROMPT, "batching": {"kv_memory": 2**19}})
    assert kinds(rows) == ["ok", "cannot_fit", "ok"]
    alone = write_parquet(tmp_path / "alone/a.parquet", prompt=["short", "short too"])
    expected = answers(tmp_path, tiny_model, {"input": {**PROMPT, "path": str(alone)}}, "other")
    assert [rows[0]["text"], rows[2]["text"]] == [row["text"] for row in expected]


ODD = ["a\0b", "👩‍👩‍👧 family", "<|im_end|>", "lone \ud83d", "after"]


@pytest.mark.parametrize("result", ["parquet", "jsonl"])
def test_case_M_odd_text_in_json_lines(tmp_path: Path, tiny_model: Path, result: str) -> None:
    lines = [json.dumps({"prompt": text, "id": text}) for text in ODD]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    tables = {
        "input": {**PROMPT, "path": "a.jsonl", "keep": ("id",)},
        "output": {"format": result, "columns": ["prompt_text"]},
    }
    rows = answers(tmp_path, tiny_model, tables)
    whole = [text.replace("\ud83d", "\ufffd") for text in ODD]
    assert kinds(rows) == ["ok", "ok", "ok", "bad_text", "ok"]
    shown = [row["prompt_text"] for row in rows]
    assert shown == [*whole[:3], None, whole[4]]
    assert [row["id"] for row in rows] == whole
    # spelled in bytes: text, not the one token that ends a turn
    assert rows[2]["prompt_tokens"] == len("<|im_end|>")


@pytest.mark.parametrize("result", ["parquet", "jsonl"])
def test_case_M_bytes_of_a_string_column_that_are_not_utf8(
    tmp_path: Path, tiny_model: Path, result: str
) -> None:
    raw = [b"before", b"\xff\xfe", "👩‍👩‍👧\0".encode(), b"after"]
    texts = pa.array(raw, pa.binary()).view(pa.string())
    write_parquet(tmp_path / "in/a.parquet", prompt=texts, id=texts)
    tables = {"input": {**PROMPT, "keep": ("id",)}, "output": {"format": result}}
    rows = answers(tmp_path, tiny_model, tables)
    assert kinds(rows) == ["ok", "bad_text", "ok", "ok"]
    assert [row["id"] for row in rows] == ["before", "\ufffd\ufffd", "👩‍👩‍👧\0", "after"]


def test_case_N_numbers_are_bad_type_rows_and_said_once_by_check(
    tmp_path: Path, tiny_model: Path
) -> None:
    for name in "abc":
        write_parquet(tmp_path / f"in/{name}.parquet", prompt=[1, 2])
    settings = settings_of(tmp_path, tiny_model, {"input": PROMPT})
    report = examine(settings, rows=True, load=False)
    assert len([said for said in report.warnings if "int64" in said]) == 1
    assert kinds(answers(tmp_path, tiny_model, {"input": PROMPT})) == ["bad_type"] * 6


def test_case_N_a_missing_column_of_a_template_is_refused_by_check_and_run(
    tmp_path: Path, tiny_model: Path
) -> None:
    write_parquet(tmp_path / "in/a.parquet", question=["x"])
    tables = {"input": {"path": "in", "template": "{{ question }} {{ queston }}"}}
    with pytest.raises(ConfigError, match="`queston`") as refused:
        examine(settings_of(tmp_path, tiny_model, tables), load=False)
    assert "`question`" in refused.value.hint
    with pytest.raises(ConfigError, match="`queston`"):
        answers(tmp_path, tiny_model, tables)
    assert not (tmp_path / "run").exists()


def test_case_N_a_null_that_a_template_prints_is_an_error_of_its_row(
    tmp_path: Path, tiny_model: Path
) -> None:
    write_parquet(tmp_path / "in/a.parquet", a=["x", None, "y"], b=[1, 2, None])
    table = {"path": "in", "template": "{{ a }}{% if b %} {{ b }}{% endif %}", "chat": False}
    tables = {"input": table, "output": {"columns": ["prompt_text"]}}
    rows = answers(tmp_path, tiny_model, tables)
    assert kinds(rows) == ["ok", "template_error", "ok"]
    assert "`a`" in rows[1]["error"]
    assert [row["prompt_text"] for row in rows] == ["x 1", None, "y"]


def test_case_N_a_chat_template_that_raises_is_an_error_with_its_message(
    tmp_path: Path, tiny_model: Path
) -> None:
    turns = [[{"role": role, "content": "x"}] for role in ("user", "bad", "user")]
    write_parquet(tmp_path / "in/a.parquet", turns=turns)
    rows = answers(tmp_path, tiny_model, {"input": {"path": "in", "messages": "turns"}})
    assert kinds(rows) == ["ok", "template_error", "ok"]
    assert "no role named bad here" in rows[1]["error"]


BAD = {
    "temperature": -1,
    "top_p": 0,
    "max_new_tokens": 0,
    "top_k": -1,
    "min_p": 1.5,
    "repetition_penalty": 0,
    "presence_penalty": "much",
    "n": 0,
    "seed": 1.5,
    "stop": 7,
    "ignore_eos": "perhaps",
    "min_new_tokens": -1,
    "stop_token_ids": [10**6],
    "frequency_penalty": [],
    "temprature": 1,
}


def test_case_Q_bad_parameters_are_errors_of_their_rows_that_name_them(
    tmp_path: Path, tiny_model: Path
) -> None:
    asked = [None, *({name: value} for name, value in BAD.items()), {"temperature": 0}]
    lines = [json.dumps({"prompt": "x", "how": how}) for how in asked]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    rows = answers(
        tmp_path, tiny_model, {"input": {**PROMPT, "path": "a.jsonl", "params": ("how",)}}
    )
    assert kinds(rows) == ["ok", *["bad_params"] * len(BAD), "ok"]
    for row, name in zip(rows[1:-1], BAD, strict=True):
        assert name in row["error"]
    assert rows[0]["text"] == rows[-1]["text"]
