"""The least time of a step, computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jobrunner.console.machine import MachineLimits
from jobrunner.records import Step

LIMITS = MachineLimits(
    flops_per_token=200.0,
    weight_bytes=1000.0,
    kv_bytes_per_token=10.0,
    gemm_flops_per_s=1000.0,
    read_bytes_per_s=100.0,
)


def test_decode_is_bound_by_reading_weights_and_context() -> None:
    step = Step(decode_tokens=2, tokens_computed=2, batch_size=2, context_tokens=50)
    # 400 FLOPs take 0.4 s, 1,000 + 500 bytes take 15 s
    assert LIMITS.least_s(step) == pytest.approx(15.0)


def test_prefill_is_bound_by_the_flops_of_its_tokens() -> None:
    step = Step(prefill_tokens=100, tokens_computed=100, batch_size=1)
    # 20,000 FLOPs take 20 s, 1,000 bytes take 10 s
    assert LIMITS.least_s(step) == pytest.approx(20.0)


def test_padded_and_recomputed_tokens_are_not_needed() -> None:
    step = Step(tokens_computed=130, tokens_padded=20, tokens_recomputed=10, batch_size=1)
    assert LIMITS.least_s(step) == pytest.approx(20.0)


def test_output_projection_counts_for_sampled_tokens_only() -> None:
    limits = replace(LIMITS, flops_per_output_token=5000.0)
    step = Step(prefill_tokens=100, tokens_computed=100, output_tokens=1, batch_size=1)
    assert limits.least_s(step) == pytest.approx(25.0)
