"""Does our engine answer as transformers' `generate` does? One model folder, one verdict."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from jobrunner.engine.loading import open_engine
from jobrunner.records import Completion, Request, RowId, Sampling, Step
from tests.fakes import FakeRequests, LetterText
from tests.reference import NEAR_TIE, gap_at_first_difference
from tests.tiny import VOCABULARY

BLOCK_SIZE = 4
NEW_TOKENS = 12
# far shorter than the prompts, so that most prompts are cut in several pieces
CHUNK_SIZE = 6
# some prompts do not fit side by side: sequences are preempted
BLOCKS = 20


@dataclass(frozen=True, slots=True)
class Verdict:
    """How many tokens were equal, the first difference in words, and where rounding decided.

    A near tie is a difference of two tokens whose logits are nearer than rounding explains.
    """

    tokens: int
    difference: str
    near_ties: Sequence[str]
    preemptions: int
    tokens_cached: int
    distinct: int

    @property
    def equal(self) -> bool:
        return not self.difference and not self.near_ties


def ragged_prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Prompts of 1 to 30 tokens; every third begins like the first, so that prefixes are shared."""
    numbers = random.Random(seed)
    shared = [numbers.randrange(1, VOCABULARY) for _ in range(17)]
    prompts = []
    for index in range(count):
        length = numbers.randint(1, 30) if index % 3 else 6
        own = [numbers.randrange(1, VOCABULARY) for _ in range(length)]
        prompts.append(own if index % 3 else shared + own)
    return prompts


def compare_with_generate(
    folder: Path,
    *,
    prompts: int = 9,
    prepare: Callable[[Any], None] = lambda model: None,
    use_cache: bool = True,
    **settings: Any,
) -> Verdict:
    """Answer prompts on both sides, greedily, in float32.

    `use_cache` is the reference's; `prepare` may change its model before it answers. Raises
    ModelError where our engine refuses the model.
    """
    rows = [
        Request(RowId("s", index), prompt, Sampling(NEW_TOKENS))
        for index, prompt in enumerate(ragged_prompts(prompts))
    ]
    steps = _serve(folder, rows, settings)
    done = {c.id.index: c for step in steps for c in step.completions}
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    prepare(model)
    # texts are of one length; a model's own idea of an end stays out
    model.generation_config.eos_token_id = None
    expected = [_generate(model, row.prompt, use_cache) for row in rows]
    compared = list(_compare(model, rows, [done[n] for n in range(len(rows))], expected))
    return Verdict(
        tokens=sum(equal for equal, _, _ in compared),
        difference=next((text for _, text, _ in compared if text), ""),
        near_ties=[text for _, _, text in compared if text],
        preemptions=sum(step.preemptions for step in steps),
        tokens_cached=sum(step.tokens_cached for step in steps),
        distinct=len({tuple(tokens) for tokens in expected}),
    )


def _serve(folder: Path, rows: Sequence[Request], settings: dict[str, Any]) -> list[Step]:
    def opened(kv_memory: int) -> Any:
        return open_engine(
            folder,
            **{
                "open_text": lambda: LetterText(str),
                "dtype": "float32",
                "device": "cpu",
                "block_size": BLOCK_SIZE,
                "kv_memory": kv_memory,
                "max_batch_size": 5,
                "token_budget": 16,
                "chunk_size": CHUNK_SIZE,
                # whoever fits now is let in: so some have to give way later
                "ahead": False,
                **settings,
            },
        )

    loaded = opened(2**20)
    loaded = opened(BLOCKS * BLOCK_SIZE * loaded.kv_bytes_per_token)
    # one more becomes ready each step, so that prompts meet decodes
    return list(loaded.engine.run(FakeRequests(rows, [3] + [1] * 999)))


def _generate(model: Any, prompt: Sequence[int], use_cache: bool) -> list[int]:
    ids = torch.tensor([list(prompt)])
    whole = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        use_cache=use_cache,
        pad_token_id=0,
    )
    return list(whole[0, len(prompt) :].tolist())


def _compare(
    model: Any, rows: Sequence[Request], done: Sequence[Completion], expected: Sequence[list[int]]
) -> Iterator[tuple[int, str, str]]:
    """Of each row: how many tokens are equal, and what differs, or is a near tie."""
    for row, completion, tokens in zip(rows, done, expected, strict=True):
        ours = list(completion.tokens)
        if ours == tokens:
            yield len(tokens), "", ""
            continue
        same = next(n for n in range(len(tokens)) if ours[:n] == tokens[:n] != ours[: n + 1])
        gap = gap_at_first_difference(model, row.prompt, ours, tokens)
        rounding = _rounding(model, [*row.prompt, *tokens[:same]])
        text = f"row {row.id.index}: {ours} is not {tokens}, gap {gap:.2g}, rounding {rounding:.2g}"
        near = gap < max(NEAR_TIE, 2 * rounding)
        yield same, "" if near else text, text if near else ""


def _rounding(model: Any, tokens: Sequence[int]) -> float:
    """How far float32 takes the logits of the last token from those of float64."""
    ids = torch.tensor([list(tokens)])
    with torch.inference_mode():
        narrow = model(input_ids=ids).logits[0, -1]
        wide = copy.deepcopy(model).double()(input_ids=ids).logits[0, -1]
    return float((narrow - wide).abs().max())
