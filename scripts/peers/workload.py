"""Make the requests that engines are compared on: real text cut to given lengths.

usage: scripts/peers/workload.py MODEL_FOLDER LENGTHS.csv OUT.jsonl [--limit N]
       scripts/peers/workload.py --long-answers OUT.csv

Each line has `id`, `prompt_token_ids` and `max_tokens`. No two prompts begin alike, so that
nothing can be shared between them. Every engine is made to answer with exactly `max_tokens` tokens,
greedily, so that all do the same work.

lengths.csv is a ragged job: 256 prompts of 21 to 1,500 tokens (median 149), outputs of 8 to 384
(median 64). long_answers.csv is its opposite, short prompts and long outputs, and nothing is tuned
for it; --long-answers writes it.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TEXTS = ROOT / "jobs" / "data" / "gsm8k"
# prompts that differ in their first tokens have no block of any usual size in common
BEGINNING = 8
SEED = 0

LONG_ANSWERS = 192
SHORTEST_PROMPT, LONGEST_PROMPT = 8, 64
SHORTEST_OUTPUT, LONGEST_OUTPUT = 64, 512


class Length(NamedTuple):
    """How many tokens a prompt has, and how many its answer gets."""

    prompt_tokens: int
    output_tokens: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("lengths", nargs="?", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--long-answers", action="store_true")
    chosen = parser.parse_args()
    if chosen.long_answers:
        write_lengths(chosen.out, long_answers())
        return 0
    if chosen.model is None or chosen.lengths is None:
        parser.error("MODEL_FOLDER, LENGTHS.csv and OUT.jsonl are needed")
    write_workload(chosen.out, chosen.model, read_lengths(chosen.lengths)[: chosen.limit])
    return 0


def long_answers() -> list[Length]:
    """Lengths whose logarithms are spread evenly, prompts and outputs independent of each other.

    Request i has a prompt of 8 · 8^u tokens and an output of 64 · 8^v, rounded, where u and v are
    the fractions of i times the golden ratio and of i times the root of 2: 8 to 64 (median 23),
    64 to 507 (median 178).
    """

    def spread(shortest: int, longest: int, place: float) -> int:
        return round(shortest * math.pow(longest / shortest, place % 1.0))

    golden, root = (1 + math.sqrt(5)) / 2, math.sqrt(2)
    return [
        Length(
            spread(SHORTEST_PROMPT, LONGEST_PROMPT, i * golden),
            spread(SHORTEST_OUTPUT, LONGEST_OUTPUT, i * root),
        )
        for i in range(LONG_ANSWERS)
    ]


def read_lengths(path: Path) -> list[Length]:
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        return [Length(int(row["prompt_tokens"]), int(row["output_tokens"])) for row in rows]


def write_lengths(path: Path, lengths: Sequence[Length]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Length._fields)
        writer.writerows(lengths)


def write_workload(path: Path, model: Path, lengths: Sequence[Length]) -> None:
    """Write a request of each length; the same lengths give the same requests."""
    with path.open("w") as file:
        for i, (prompt, length) in enumerate(zip(prompts(model, lengths), lengths, strict=True)):
            request = {
                "id": f"r{i:05d}",
                "prompt_token_ids": prompt,
                "max_tokens": length.output_tokens,
            }
            file.write(json.dumps(request) + "\n")


def prompts(model: Path, lengths: Sequence[Length]) -> Iterator[list[int]]:
    """Cut the texts, read as a ring, at places that are chosen at random, no two alike."""
    tokens = tokens_of_the_texts(model)
    ring = tokens * (1 + -(-max(length.prompt_tokens for length in lengths) // len(tokens)))
    places = list(range(len(tokens)))
    random.Random(SEED).shuffle(places)
    beginnings: set[tuple[int, ...]] = set()
    for length in lengths:
        prompt: list[int] = []
        while not prompt or tuple(prompt[:BEGINNING]) in beginnings:
            if not places:
                raise SystemExit(f"the texts have no {len(lengths)} places that differ")
            place = places.pop()
            prompt = ring[place : place + length.prompt_tokens]
        beginnings.add(tuple(prompt[:BEGINNING]))
        yield prompt


def tokens_of_the_texts(model: Path) -> list[int]:
    import pyarrow.parquet as pq
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokens: list[int] = []
    for path in sorted(TEXTS.glob("*.parquet")):
        for row in pq.read_table(path, columns=["question", "answer"]).to_pylist():
            text = f"{row['question']}\n{row['answer']}\n\n"
            tokens += tokenizer(text, add_special_tokens=False).input_ids
    return tokens


if __name__ == "__main__":
    sys.exit(main())
