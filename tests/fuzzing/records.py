"""Draw the records of a shard as Python values. Knows nothing of how a format spells them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.fuzzing.corpus import Corpus, surrogate

SOURCES = ("prompt", "messages", "template", "token_ids")
ROLES = ("user", "user", "user", "assistant", "system", "tool", "bad")
# the last ones of each are wrong
PARAMETERS: dict[str, tuple[Any, ...]] = {
    "temperature": (0.0, 0.7, 2.5, -1.0, float("nan"), float("inf")),
    "top_p": (1.0, 0.5, 0.0, 1.5),
    "top_k": (0, 5, -3),
    "min_p": (0.1, 2.0),
    "repetition_penalty": (1.0, 1.3, 0.0),
    "max_new_tokens": (1, 2, 5, 20, 0, -1),
    "min_new_tokens": (0, 2, 30),
    "stop": (["a", "b"], ["\n"], ["Hello", "👩"], []),
    "stop_token_ids": ([5, 6], [2], [10**6], [-1]),
    "seed": (1, 2**62, -5),
    "n": (1, 2, 3, 0, 5000),
    "ignore_eos": (True, False),
}
# depths of nesting around what Python's own limits allow
DEPTHS = (5, 60, 200, 330, 490, 900, 950, 985, 1500, 20_000)
Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Recipe:
    """What the records of one job hold.

    `source` is the kind of prompts, `column` the name of their column; `params` is empty, or
    `struct`, or names of parameters that have columns of their own.
    """

    source: str
    column: str
    params: tuple[str, ...]
    extras: tuple[str, ...]
    tools: bool
    vocabulary: int

    @property
    def struct(self) -> bool:
        return self.params == ("struct",)


def draw_record(
    recipe: Recipe, name: str, index: int, rng: random.Random, corpus: Corpus
) -> Record:
    """Draw the record of a row; its id says which row of which shard it is."""
    record: Record = {"id": f"{name}-{index}"}
    record[recipe.column] = None if rng.random() < 0.02 else _source(recipe, rng, corpus)
    if recipe.source == "template":
        record["name"] = None if rng.random() < 0.05 else corpus.text(rng)
        record["number"] = rng.choice((None, 1, -(2**40), 17))
    if recipe.struct:
        record["params"] = draw_parameters(rng) if rng.random() < 0.5 else None
    else:
        some = draw_parameters(rng, recipe.params) if rng.random() < 0.4 else {}
        record |= {name: some.get(name) for name in recipe.params}
    if recipe.tools:
        deep = "[" * rng.choice(DEPTHS)
        deep += "{}" + "]" * len(deep)
        record["tools"] = rng.choice(
            (None, "[]", '[{"type": "function"}]', "[", "7", deep, f'[{{"type": {deep}}}]')
        )
    record |= {name: draw_extra(name, rng, corpus) for name in recipe.extras}
    return record


def _source(recipe: Recipe, rng: random.Random, corpus: Corpus) -> Any:
    if recipe.source == "messages":
        return draw_messages(rng, corpus)
    if recipe.source == "token_ids":
        most = recipe.vocabulary + (rng.random() < 0.01)
        return [rng.randrange(most) for _ in range(rng.choice((0, 1, 5, 30)))]
    # a few of the same: rows are told apart by where they stand, never by what they say
    return "the same" if rng.random() < 0.1 else corpus.text(rng)


def draw_messages(rng: random.Random, corpus: Corpus) -> list[dict[str, Any]]:
    """Draw a conversation; some have roles or contents that no template takes."""
    count = rng.choice((0, 1, 1, 1, 2, 3))
    return [
        {
            "role": rng.choice(ROLES),
            "content": None if rng.random() < 0.02 else corpus.text(rng),
        }
        for _ in range(count)
    ]


def draw_parameters(rng: random.Random, names: tuple[str, ...] = ()) -> dict[str, Any]:
    """Draw some parameters, mostly good ones."""
    chosen = rng.sample(sorted(names or PARAMETERS), k=min(len(names) or 12, rng.randint(1, 3)))
    return {name: _parameter(name, rng) for name in chosen}


def _parameter(name: str, rng: random.Random) -> Any:
    good = 2 if name not in ("max_new_tokens",) else 4
    values = PARAMETERS[name]
    return rng.choice(values if rng.random() < 0.15 else values[:good])


def draw_extra(name: str, rng: random.Random, corpus: Corpus) -> Any:
    """Draw a value of a kept column; its name says of what kind."""
    if rng.random() < 0.1:
        return None
    drawn: Mapping[str, Any] = {
        "text": lambda: corpus.text(rng),
        "whole": lambda: rng.choice((0, 1, -(2**63), 2**63 - 1, 2**53 + 1)),
        "real": lambda: rng.choice((0.1, -0.0, 1e308, 5e-324, 3.0)),
        "flag": lambda: rng.random() < 0.5,
        "list": lambda: [rng.randint(-9, 9) for _ in range(rng.randint(0, 3))],
        "nested": lambda: {"a": corpus.text(rng), "b": [rng.randint(0, 9)]},
    }
    return drawn[name.partition(" ")[0]]()


def spoil(record: Record, rng: random.Random, corpus: Corpus) -> Record:
    """Make a record strange in a way that only JSON can hold: other types, other keys."""
    name = rng.choice(sorted(record))
    changed = dict(record)
    way = rng.randint(0, 4)
    if way == 0:
        del changed[name]
    elif way == 1:
        changed[name] = corpus.value(rng)
    elif way == 2:
        changed[name] = surrogate(corpus.text(rng)[:100], rng)
    elif way == 3:
        changed[corpus.drawn(rng)] = corpus.value(rng)
    else:
        changed[name] = [changed[name], {"role": "user", "content": changed[name]}]
    return changed


def draw_request(name: str, index: int, rng: random.Random, corpus: Corpus) -> Record:
    """Draw a line of an OpenAI batch file."""
    chat = rng.random() < 0.6
    body: Record = {"model": "any", **_openai_parameters(rng, chat=chat)}
    if chat:
        body["messages"] = draw_messages(rng, corpus)
    else:
        body["prompt"] = rng.choice((corpus.text(rng), [corpus.text(rng)], [5, 6, 7]))
    return {
        "custom_id": f"{name}-{index}",
        "method": "POST" if rng.random() < 0.98 else "GET",
        "url": "/v1/chat/completions" if chat else "/v1/completions",
        "body": body,
    }


def _openai_parameters(rng: random.Random, *, chat: bool) -> Record:
    chosen: tuple[Record, ...] = (
        {},
        {},
        {"temperature": 0.7, "seed": 3, "n": 2},
        {"max_tokens": rng.choice((1, 3, 0))},
        {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2},
        {"stop": rng.choice(("a", ["a", "\n"], [], None, 7))},
        {"response_format": {"type": "json_object"}},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto"},
        {"logit_bias": {"5": 1}},
    )
    return rng.choice(chosen)
