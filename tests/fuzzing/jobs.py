"""Draw a whole job: its files, its job file, and what is to happen to it."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fuzzing.corpus import Corpus
from tests.fuzzing.files import compress, csv_lines, draw_types, json_lines, write_parquet
from tests.fuzzing.mutation import mutate
from tests.fuzzing.records import (
    PARAMETERS,
    SOURCES,
    Recipe,
    Record,
    draw_record,
    draw_request,
)

FORMATS = ("parquet", "parquet", "parquet", "jsonl", "jsonl", "jsonl", "csv", "openai")
_COLUMNS = ("prompt", "prompt", "row.x", "p p", "text", "π", "a\tb", "Prompt", "status")
_EXTRAS = ("text", "whole", "real", "flag", "list", "nested")
_SHARDS = ("a", "b b", "ü", "x[1]", "deep/er/c", "year=2024/kind=a%20b/d", "year=x/e", "f.parquet")
_SUFFIXES = {
    "parquet": (".parquet",),
    "jsonl": (".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson"),
    "csv": (".csv", ".csv.gz"),
    "openai": (".jsonl", ".jsonl.gz"),
}
_TEMPLATES = (
    "{{ word }} of {{ name }}",
    "{{ word|upper }}{{ number + 1 }}",
    "<|im_start|>user\n{{ word }}<|im_end|>{% if number %}{{ number }}{% endif %}",
    "{% for c in word %}{{ c }}{% endfor %}",
    "{{ word }}{{ name.missing }}",
    "{{ word }}{{ 1 / (number or 0) }}",
)
_STOPS = ("a", "Hello", "\n", "👩", " ", "\ufffd", "<|im_end|>")


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """How the fake engine is built; `capacity_tokens` is the room of its KV memory."""

    batch: int
    budget: int
    chunk: int
    lookahead: int
    block_size: int
    capacity_tokens: int
    prefix_cache: bool


@dataclass(frozen=True, slots=True)
class Life:
    """One start of a job: how it ends (`finish`, `stop`, `kill`), and after how many steps."""

    end: str
    steps: int
    limits: EngineLimits


@dataclass(frozen=True, slots=True)
class DrawnJob:
    """A job in a folder: its job file, its shards by name, and its lives."""

    folder: Path
    kind: str
    files: dict[str, Path]
    lives: tuple[Life, ...]
    mutated: bool
    retry: bool
    limit: int | None

    @property
    def job_file(self) -> Path:
        return self.folder / "job.toml"


def draw_job(
    folder: Path, rng: random.Random, corpus: Corpus, model: Path, vocabulary: int, most_rows: int
) -> DrawnJob:
    """Write the files of a job into an empty folder."""
    format_name = rng.choice(FORMATS)
    sources = SOURCES if format_name in ("parquet", "jsonl") else ("prompt", "prompt", "template")
    recipe = _draw_recipe(rng.choice(sources), format_name, rng, vocabulary)
    suffixes = _draw_suffixes(format_name, rng)
    files = _write_files(folder / "input", format_name, suffixes, recipe, rng, corpus, most_rows)
    mutated = rng.random() < 0.25
    if mutated:
        for path in rng.sample(sorted(files.values()), k=rng.randint(1, len(files))):
            path.write_bytes(mutate(path.read_bytes(), rng))
    document = _draw_document(format_name, recipe, rng, corpus, model)
    spelled = _spelled(document)
    (folder / "job.toml").write_text(spelled, encoding="utf-8")
    source = "openai" if format_name == "openai" else recipe.source
    return DrawnJob(
        folder,
        f"{format_name} {source}{' mutated' if mutated else ''}",
        files,
        _draw_lives(rng),
        mutated,
        retry=rng.random() < 0.15,
        limit=rng.randint(1, most_rows) if rng.random() < 0.1 else None,
    )


def _draw_recipe(source: str, format_name: str, rng: random.Random, vocabulary: int) -> Recipe:
    params: tuple[str, ...] = ()
    if rng.random() < 0.35:
        params = ("struct",)
    elif rng.random() < 0.3:
        params = tuple(rng.sample(sorted(PARAMETERS), k=rng.randint(1, 4)))
    column = "word" if source == "template" else rng.choice(_COLUMNS)
    extras = tuple(f"{name} kept" for name in rng.sample(_EXTRAS, k=rng.choice((0, 0, 1, 2, 4))))
    tools = source in ("prompt", "messages") and rng.random() < 0.1
    return Recipe(source, column, params, extras, tools, vocabulary)


def _draw_suffixes(format_name: str, rng: random.Random) -> tuple[str, ...]:
    known = _SUFFIXES[format_name]
    return known if rng.random() < 0.3 else (rng.choice(known),)


def _write_files(
    root: Path,
    format_name: str,
    suffixes: tuple[str, ...],
    recipe: Recipe,
    rng: random.Random,
    corpus: Corpus,
    most_rows: int,
) -> dict[str, Path]:
    files: dict[str, Path] = {}
    types = draw_types(recipe, rng)
    for name in rng.sample(_SHARDS, k=rng.choice((1, 1, 2, 3, 5))):
        rows = min(most_rows, rng.choice((0, 1, 2, 17, 63, 64, 65, 128, 200, 400, 400)))
        if rng.random() < 0.03:
            rows = min(most_rows, 2500)
        shard = name + rng.choice(suffixes)
        path = root / shard
        path.parent.mkdir(parents=True, exist_ok=True)
        if format_name == "openai":
            requests = [draw_request(shard, index, rng, corpus) for index in range(rows)]
            path.write_bytes(compress(json_lines(requests, rng, corpus), shard))
        else:
            records = [draw_record(recipe, shard, index, rng, corpus) for index in range(rows)]
            if rng.random() < 0.02:
                types = draw_types(recipe, rng)
            _write(path, format_name, records, recipe, types, rng, corpus)
        files[shard] = path
    return files


def _write(
    path: Path,
    format_name: str,
    records: list[Record],
    recipe: Recipe,
    types: dict[str, Any],
    rng: random.Random,
    corpus: Corpus,
) -> None:
    if format_name == "parquet":
        write_parquet(path, records, recipe, types, rng)
    else:
        lines = json_lines if format_name == "jsonl" else csv_lines
        path.write_bytes(compress(lines(records, rng, corpus), path.name))


def _draw_document(
    format_name: str, recipe: Recipe, rng: random.Random, corpus: Corpus, model: Path
) -> dict[str, dict[str, Any]]:
    openai = format_name == "openai"
    read: dict[str, Any] = {"path": "input"}
    if openai or rng.random() < 0.2:
        read["format"] = format_name
    if not openai:
        read |= _draw_prompts(recipe, rng, corpus)
    elif rng.random() < 0.2:
        read["system"] = corpus.text(rng)[:50].replace("\0", "")
    read["too_long"] = rng.choice(
        ("error", "error", "truncate_left", "truncate_right", "truncate_middle")
    )
    length = rng.choice(("auto", "auto", 40, 64, 256, 3))
    return {
        "job": {"name": "fuzz", "seed": rng.randint(0, 9)},
        "input": read,
        "output": {"path": "run", **({} if openai else _draw_output(rng))},
        "model": {"name": str(model), "dtype": "float32", "max_model_len": length},
        "generation": _draw_generation(rng),
        "batching": _draw_batching(rng),
        "checkpoint": {
            "every": rng.choices(("20ms", "300ms", "1h"), (1, 2, 9))[0],
            # each part is a wait for the disk
            "part_rows": rng.choices((1, 5, 50, 500), (1, 3, 8, 8))[0],
        },
        "errors": rng.choice(({"max_rate": 1.0}, {"max_rate": 1.0}, {}, {"max_count": 30})),
        "progress": {"style": "off"},
    }


def _draw_prompts(recipe: Recipe, rng: random.Random, corpus: Corpus) -> dict[str, Any]:
    made = rng.choice(_TEMPLATES) if recipe.source == "template" else recipe.column
    read: dict[str, Any] = {recipe.source: made}
    if recipe.source == "messages":
        read["chat"] = rng.choice(("auto", True))
    elif recipe.source != "token_ids":
        read["chat"] = rng.choice(("auto", True, False))
    chat = recipe.source != "token_ids" and read.get("chat") is not False
    if chat and rng.random() < 0.25:
        read["system"] = rng.choice(("Be brief.", corpus.text(rng)[:50].replace("\0", "")))
    if chat and rng.random() < 0.2:
        read["prefill"] = rng.choice(("Sure: ", "{{ id }}:", "<|im_end|>"))
    if chat and recipe.tools:
        read["tools"] = "tools"
    if recipe.params:
        read["params"] = ["params"] if recipe.struct else list(recipe.params)
    keep = ["id", *recipe.extras]
    if rng.random() < 0.1:
        keep.append(recipe.column)
    read["keep"] = keep
    if rng.random() < 0.1:
        read["id"] = "id"
    return read


def _draw_output(rng: random.Random) -> dict[str, Any]:
    output: dict[str, Any] = {"format": rng.choice(("auto", "parquet", "jsonl", "jsonl"))}
    output["columns"] = rng.sample(("prompt_text", "token_ids", "chunks"), k=rng.randint(0, 3))
    if rng.random() < 0.2:
        output["logprobs"] = rng.choice((0, 1, 3))
    if rng.random() < 0.5:
        output["compression"] = rng.choice(("zstd", "snappy", "gzip", "none"))
    if output["format"] == "jsonl" and output.get("compression") == "snappy":
        output["compression"] = "gzip"
    return output


def _draw_generation(rng: random.Random) -> dict[str, Any]:
    generation: dict[str, Any] = {"max_new_tokens": rng.choice((1, 4, 8, 12, 3000))}
    some: dict[str, Any] = {
        "temperature": rng.choice((0.0, 0.8)),
        "stop": rng.sample(_STOPS, k=rng.randint(1, 3)),
        "stop_token_ids": [rng.randint(0, 90)],
        "n": rng.choice((1, 2, 3)),
        "seed": rng.randint(0, 5),
        "min_new_tokens": rng.choice((0, 1)),
        "stop_on_repetition": rng.choice((0, 4)),
        "ignore_eos": True,
        "use_model_defaults": True,
    }
    for name in rng.sample(sorted(some), k=rng.choice((0, 0, 1, 2, 3))):
        generation[name] = some[name]
    if generation.get("ignore_eos") and generation["max_new_tokens"] > 100:
        generation["max_new_tokens"] = 30
    return generation


def _draw_batching(rng: random.Random) -> dict[str, Any]:
    batch = rng.choice((1, 3, 16))
    return {
        "max_batch_size": batch,
        "token_budget": batch + rng.choice((0, 5, 60)),
        "chunk_size": rng.choice((1, 7, 32)),
        "block_size": rng.choice((1, 4, 16)),
        "kv_memory": rng.choice(("48KiB", "256KiB", "2MiB")),
        "prefix_cache": rng.random() < 0.7,
        "lookahead": rng.choice((1, 4, 32)),
    }


def _draw_lives(rng: random.Random) -> tuple[Life, ...]:
    """Lives end early, but for the last one; each may have other limits on the same memory."""
    block_size = rng.choice((1, 4, 8, 16))
    capacity = rng.choice((48, 128, 400, 2048, 4096))
    ends = [rng.choice(("stop", "kill")) for _ in range(rng.choice((0, 0, 0, 1, 2, 3)))]
    return tuple(
        Life(end, rng.choice((0, 1, 2, 5, 20, 60, 200)), _limits(rng, block_size, capacity))
        for end in [*ends, "finish"]
    )


def _limits(rng: random.Random, block_size: int, capacity: int) -> EngineLimits:
    batch = rng.choice((1, 2, 8, 32))
    # the fake model reads all the context in each step: long prompts need few of them
    long = capacity > 128
    return EngineLimits(
        batch,
        batch + rng.choice((64, 200) if long else (0, 3, 64)),
        rng.choice((32, 100) if long else (1, 5, 32)),
        rng.choice((1, 4, 16, 64)),
        block_size,
        capacity,
        rng.random() < 0.7,
    )


def _spelled(document: dict[str, dict[str, Any]]) -> str:
    lines = []
    for table, entries in document.items():
        lines.append(f"[{table}]")
        lines += [f"{key} = {_toml(value)}" for key, value in entries.items()]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
