"""Answer requests with transformers' `generate` in given batches. Knows nothing of our scheduler.

Shapes: B rows of a batch, T tokens of the longest prompt, padded on the left, N new tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteriaList

from jobrunner.engine.attention.hook import attach
from jobrunner.engine.loading import PlacedModel
from jobrunner.records import Completion, Request, Step

Clock = Callable[[], float]


def generate_steps(
    placed: PlacedModel,
    batches: Sequence[Sequence[Request]],
    clock: Clock = time.perf_counter,
) -> Iterator[Step]:
    """Answer batches greedily, one after the other; tell of each forward pass as a step.

    Rows of one batch end with the same ids; nothing else of their sampling but its
    `max_new_tokens` is obeyed. As long as this runs the model attends as transformers lets it.
    """
    with _own_attention(placed):
        asked_s = clock()
        for batch in batches:
            yield from _answer(placed.model, batch, asked_s, clock)


@contextmanager
def _own_attention(placed: PlacedModel) -> Iterator[None]:
    model: Any = placed.model
    own_config = model.generation_config
    # what a model recommends for drawing tokens is not asked for
    model.generation_config = GenerationConfig()
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    try:
        yield
    finally:
        model.generation_config = own_config
        attach(model, placed.attention)


class _Times:
    """Ends no row; notes when each token of a batch was there."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.times: list[float] = []

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.times.append(self._clock())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


@dataclass(frozen=True, slots=True)
class _Answered:
    """A batch with the tokens of each row, and when it was asked for, begun, and had each."""

    requests: Sequence[Request]
    outputs: Sequence[Sequence[int]]
    asked_s: float
    started_s: float
    times: Sequence[float]

    @property
    def width(self) -> int:
        return max(len(request.prompt) for request in self.requests)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self.requests)


def _answer(model: Any, batch: Sequence[Request], asked_s: float, clock: Clock) -> Iterator[Step]:
    started_s = clock()
    ends = sorted(batch[0].sampling.stop_ids)
    times = _Times(clock)
    ids_BT, mask_BT = _padded(batch, ends[0] if ends else 0, model.device)
    with torch.inference_mode():
        output_BN = model.generate(
            input_ids=ids_BT,
            attention_mask=mask_BT,
            generation_config=GenerationConfig(
                max_new_tokens=max(request.sampling.max_new_tokens for request in batch),
                do_sample=False,
                eos_token_id=ends or None,
                pad_token_id=ends[0] if ends else 0,
            ),
            stopping_criteria=StoppingCriteriaList([times]),
        )[:, ids_BT.shape[1] :]
    rows = zip(batch, output_BN.tolist(), strict=True)
    outputs = [_cut(tokens, request) for request, tokens in rows]
    return _steps(_Answered(batch, outputs, asked_s, started_s, times.times))


def _padded(
    batch: Sequence[Request], pad: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(request.prompt) for request in batch)
    ids_BT = torch.full((len(batch), width), pad)
    mask_BT = torch.zeros_like(ids_BT)
    for row, request in enumerate(batch):
        start = width - len(request.prompt)
        ids_BT[row, start:] = torch.tensor(list(request.prompt))
        mask_BT[row, start:] = 1
    return ids_BT.to(device), mask_BT.to(device)


def _cut(tokens: Sequence[int], request: Request) -> Sequence[int]:
    """What a row asked for: up to and with the token that ends it."""
    tokens = tokens[: request.sampling.max_new_tokens]
    ends = request.sampling.stop_ids
    stop = next((n + 1 for n, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[:stop]


def _steps(answered: _Answered) -> Iterator[Step]:
    """One step a forward pass: the padded prompts, then a token of each row, wanted or not."""
    size, last = len(answered.requests), len(answered.times) - 1
    begun = [answered.started_s, *answered.times]
    for place, ended_s in enumerate(answered.times):
        active = sum(len(output) > place for output in answered.outputs)
        real = answered.prompt_tokens if place == 0 else active
        computed = size * (answered.width if place == 0 else 1)
        yield Step(
            completions=_completions(answered) if place == last else (),
            prefill_tokens=real if place == 0 else 0,
            decode_tokens=0 if place == 0 else real,
            output_tokens=active,
            tokens_computed=computed,
            tokens_padded=computed - real,
            batch_size=active,
            running=active,
            step_s=ended_s - begun[place],
        )


def _completions(answered: _Answered) -> list[Completion]:
    """All rows leave with the last: only then does the caller have their texts."""
    return [
        _completion(request, output, answered)
        for request, output in zip(answered.requests, answered.outputs, strict=True)
    ]


def _completion(request: Request, output: Sequence[int], answered: _Answered) -> Completion:
    times = answered.times[: len(output)]
    gaps = [later - sooner for sooner, later in pairwise(times)]
    return Completion(
        id=request.id,
        tokens=output,
        finish_reason="stop" if output[-1] in request.sampling.stop_ids else "length",
        prompt_tokens=len(request.prompt),
        queue_s=answered.started_s - answered.asked_s,
        prefill_s=times[0] - answered.started_s,
        decode_s=answered.times[-1] - times[0],
        longest_gap_s=max(gaps, default=0.0),
        request=request,
        chunks=1,
    )
