"""Join the numbers of a job to its model and its machine. Knows nothing of rows or results."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from jobrunner.console.machine import MachineLimits
from jobrunner.console.snapshot import Totals
from jobrunner.console.stats import Stats, no_device_memory
from jobrunner.data.progress import Progress
from jobrunner.opening import Job

if TYPE_CHECKING:
    from jobrunner.engine.loading import ModelInfo
    from jobrunner.engine.machine import Rates


def measure(job: Job) -> MachineLimits | None:
    """Measure the machine before weights and KV fill it, if the numbers are wanted."""
    if not job.settings.progress.metrics:
        return None
    from jobrunner.engine.machine import measure_rates

    return machine_limits(job.model, measure_rates(job.device, job.dtype))


def stats_of(job: Job, progress: Progress, limits: MachineLimits | None) -> Stats:
    """Begin to count the numbers of a run that goes on from this progress."""
    size = job.settings.batching.max_batch_size
    return Stats(
        _totals(progress, job),
        slots=size if isinstance(size, int) else None,
        started_s=time.monotonic(),
        price_per_gpu_hour=job.settings.job.price_per_gpu_hour,
        limits=limits,
        device_memory=_device_memory(job.device),
    )


def _device_memory(device: str) -> Callable[[], int | None]:
    if device == "cpu":
        return no_device_memory
    from jobrunner.engine.machine import device_memory_bytes

    return partial(device_memory_bytes, device)


def machine_limits(model: ModelInfo, rates: Rates) -> MachineLimits:
    """Join what a token of the model needs with what the machine gives."""
    # a step reads neither the input embedding nor experts that nobody chose
    read_parameters = (model.flops_per_token + model.flops_per_output_token) / 2
    return MachineLimits(
        flops_per_token=model.flops_per_token,
        flops_per_output_token=model.flops_per_output_token,
        weight_bytes=read_parameters * model.weight_bytes / model.parameters,
        kv_bytes_per_token=model.kv_bytes_per_token,
        attention_flops=model.attention_flops,
        gemm_flops_per_s=rates.gemm_flops_per_s,
        read_bytes_per_s=rates.read_bytes_per_s,
    )


def _totals(progress: Progress, job: Job) -> Totals:
    return Totals(
        rows=progress.rows,
        rows_done_before=progress.rows_done,
        errors_before=progress.tally.error_rows,
        shards=len(job.input.shards),
        shards_done_before=progress.shards_merged,
    )
