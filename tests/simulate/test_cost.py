"""What a step costs: the sum by hand, and what the profile is made of."""

import pytest

from jobrunner.simulate.cost import PROFILES, StepCost


def test_a_step_costs_the_sum_of_its_parts():
    cost = StepCost(
        step_s=1.0, prefill_token_s=0.5, decode_s=0.25, context_token_s=0.125, prefill_step_s=2.0
    )
    assert cost.seconds(4, 2, 8) == 1.0 + 2.0 + 4 * 0.5 + 2 * 0.25 + 8 * 0.125


def test_a_step_without_prompts_costs_nothing_for_prompts():
    assert StepCost(step_s=1.0, prefill_token_s=0.5, prefill_step_s=2.0).seconds(0, 3, 0) == 1.0


def test_the_profile_reads_16_gb_a_step_and_computes_2_flops_a_parameter():
    profile = PROFILES["h200-8b"]
    assert profile.cost.step_s == pytest.approx(16e9 / 4.3e12)
    assert profile.cost.decode_s == pytest.approx(2 * 8e9 / 788e12)
    assert profile.cost.prefill_token_s == profile.cost.decode_s
    assert profile.cost.context_token_s == pytest.approx(2 * 32 * 8 * 128 * 2 / 4.3e12)


def test_the_profile_says_what_it_assumes():
    for figure in ("788 TFLOP/s", "4.3 TB/s", "16 GB", "131,072 bytes", "50 GB/s"):
        assert figure in PROFILES["h200-8b"].assumes
