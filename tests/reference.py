"""What transformers says by itself: the reference that answers are compared with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from jobrunner.records import Request

if TYPE_CHECKING:
    from jobrunner.opening import Job

# greedy texts may differ only where the two best logits are nearer than this, in float32
NEAR_TIE = 1e-4


def requests_of(job: Job) -> list[Request]:
    """Every row of a job that becomes a request, in order."""
    from jobrunner.data.input.sources import Reader

    reader = Reader(list(job.input.shards.values()), job.settings.input.column, job.input.needed)
    rows = [row for span in job.input.spans for batch in reader.read(span) for row in batch]
    return [item for item in job.prompts.encode(rows, {}) if isinstance(item, Request)]


def generate(
    model: Any, requests: Sequence[Request], batch_size: int
) -> Iterator[tuple[Request, list[int]]]:
    """Answer requests with `generate` in static, left-padded batches, greedily.

    Yields each request with its output tokens, up to and with the one that ends it.
    """
    for start in range(0, len(requests), batch_size):
        batch = requests[start : start + batch_size]
        width = max(len(request.prompt) for request in batch)
        ends = sorted(batch[0].sampling.stop_ids)
        ids = torch.full((len(batch), width), ends[0])
        mask = torch.zeros_like(ids)
        for row, request in enumerate(batch):
            ids[row, width - len(request.prompt) :] = torch.tensor(list(request.prompt))
            mask[row, width - len(request.prompt) :] = 1
        with torch.inference_mode():
            output = model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=max(request.sampling.max_new_tokens for request in batch),
                do_sample=False,
                eos_token_id=ends,
                pad_token_id=ends[0],
            )
        for request, tokens in zip(batch, output[:, width:].tolist(), strict=True):
            stop = next((n + 1 for n, token in enumerate(tokens) if token in ends), len(tokens))
            yield request, tokens[:stop]


def gap_at_first_difference(
    model: Any, prompt: Sequence[int], one: Sequence[int], other: Sequence[int]
) -> float:
    """How far apart the logits of two texts' first different tokens are; inf if one goes on."""
    same = next(
        (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        None,
    )
    if same is None:
        return float("inf")
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[*prompt, *one[:same]]])).logits[0, -1].float()
    return float(abs(logits[one[same]] - logits[other[same]]))
