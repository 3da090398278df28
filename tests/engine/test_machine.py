"""The measured rates are rates."""

import math

import pytest
import torch

from jobrunner.engine.machine import measure_rates

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rates_are_positive_and_finite(device, dtype):
    rates = measure_rates(device, dtype)
    for rate in (rates.gemm_flops_per_s, rates.read_bytes_per_s):
        assert math.isfinite(rate)
        assert rate > 1e6
