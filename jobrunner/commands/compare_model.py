"""Load the model of a job once, for one engine after the other. Knows nothing of measuring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from jobrunner.commands.compare_runs import Bench, Contender
from jobrunner.engine.scheduler import Limits
from jobrunner.opening import Job
from jobrunner.records import Engine, Request

if TYPE_CHECKING:
    from jobrunner.engine.loading import PlacedModel


def open_bench(job: Job, batch_size: int, requests: Sequence[Request]) -> Bench:
    """Load the model, with KV memory for batches up to this size."""
    from jobrunner.engine.peak_memory import PeakMemory
    from jobrunner.engine.reference import generate_steps

    placed = _place(job, batch_size)
    _touch(placed, requests)
    return Bench(
        open_engine=lambda contender, limits: _open_engine(job, placed, contender, limits),
        generate=lambda batches: generate_steps(placed, batches),
        memory=PeakMemory(job.device),
        kv_bytes=placed.pool.block_count * placed.pool.block_size * placed.kv_bytes_per_token,
        price_per_gpu_hour=job.settings.job.price_per_gpu_hour,
    )


def _place(job: Job, batch_size: int) -> PlacedModel:
    from jobrunner.engine.loading import place_model, prove_model, use_threads

    model, batching = job.settings.model, job.settings.batching
    use_threads(model.threads)
    proven = prove_model(
        job.model_folder,
        dtype=model.dtype,
        device=model.device,
        max_model_len=model.max_model_len,
        attention=model.attention,
        block_size=batching.block_size,
    )
    return place_model(
        proven,
        _limits(job, batch_size),
        batching,
        block_size=batching.block_size,
        kv_memory=batching.kv_memory,
    )


def _touch(placed: PlacedModel, requests: Sequence[Request]) -> None:
    """Write once to the KV memory that the rows need, so that no run has to pay for new pages."""
    pool = placed.pool
    lengths = (len(each.prompt) + each.sampling.max_new_tokens for each in requests)
    count = sum(-(-length // pool.block_size) for length in lengths)
    for tensor in (*pool.keys, *pool.values):
        tensor[:, :count].zero_()


def _open_engine(job: Job, placed: PlacedModel, contender: Contender, limits: Limits) -> Engine:
    """An engine with empty KV memory that computes every row by itself, equal ones too."""
    from jobrunner.engine.loading import build_engine

    batching = job.settings.batching
    assert contender.policy is not None, "generate has no engine"
    return build_engine(
        placed,
        limits,
        batching.model_copy(update={"policy": contender.policy}),
        job.prompts.open_text,
        prefix_cache=batching.prefix_cache,
    )


def limits_of(
    contender: Contender, job: Job, batch_size: int, requests: Sequence[Request]
) -> Limits:
    """The limits of a step. Without chunks no prompt is ever cut, nor what a preemption lost."""
    limits = _limits(job, batch_size)
    if contender.chunked:
        return limits
    lengths = sorted(
        min(job.max_model_len, len(request.prompt) + request.sampling.max_new_tokens)
        for request in requests
    )
    return replace(limits, token_budget=sum(lengths[-batch_size:]), chunk_size=lengths[-1])


def _limits(job: Job, batch_size: int) -> Limits:
    from jobrunner.engine.loading import resolve_limits

    batching = job.settings.batching
    return resolve_limits(
        job.device,
        batch_size,
        batching.token_budget,
        batching.chunk_size,
        batching.lookahead,
        batching.schedule_every,
    )
