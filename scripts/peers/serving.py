"""Let one engine answer a workload again and again, when told to. Knows no engine.

A runner loads its engine, warms up, and says so in one line of JSON on stdout; then each line
`run` on stdin makes it answer the whole workload once and say in one line how that went. Only the
standard library is used: every engine has a Python environment of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

WARM_UP_ROWS, WARM_UP_TOKENS = 4, 16


@dataclass(frozen=True)
class Row:
    """One request: as many tokens as `max_tokens` are wanted, whatever they are."""

    prompt_token_ids: list[int]
    max_tokens: int


@dataclass(frozen=True)
class Answered:
    """How long the rows took, and how many tokens each of them got, in their order."""

    wall_s: float
    lengths: list[int]


Answer = Callable[[Sequence[Row]], Answered]


class Channel:
    """The runner's stdout, of which nothing else gets hold: what libraries print goes to stderr."""

    def __init__(self) -> None:
        self._file = os.fdopen(os.dup(1), "w")
        sys.stdout.flush()
        os.dup2(2, 1)

    def say(self, **fields: object) -> None:
        self._file.write(json.dumps(fields) + "\n")
        self._file.flush()


def parser() -> argparse.ArgumentParser:
    """The options that every runner takes."""
    options = argparse.ArgumentParser()
    options.add_argument("--model", required=True, help="a folder in the transformers format")
    options.add_argument("--workload", required=True, help="a JSONL file, see workload.py")
    options.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    options.add_argument("--threads", type=int, required=True)
    return options


def read_rows(path: str) -> list[Row]:
    with open(path) as file:
        rows = [json.loads(line) for line in file]
    return [Row(row["prompt_token_ids"], row["max_tokens"]) for row in rows]


def timed(generate: Callable[[Sequence[Row]], list[list[int]]]) -> Answer:
    """Time a function that returns the tokens of each row."""

    def answer(rows: Sequence[Row]) -> Answered:
        started_s = time.perf_counter()
        outputs = generate(rows)
        return Answered(time.perf_counter() - started_s, [len(output) for output in outputs])

    return answer


def serve(
    channel: Channel, rows: Sequence[Row], answer: Answer, *, version: str, config: str
) -> None:
    """Warm up on a few rows, then answer all of them as often as asked."""
    few = rows[:WARM_UP_ROWS]
    answer([Row(row.prompt_token_ids, min(row.max_tokens, WARM_UP_TOKENS)) for row in few])
    channel.say(ready=True, version=version, config=config)
    for line in sys.stdin:
        if line.strip() != "run":
            raise SystemExit(f"not a command: {line!r}")
        channel.say(**asdict(answer(rows)))
