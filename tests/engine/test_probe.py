"""What a probe learns of a model's attention calls, and of the patterns of masks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, Gemma2Config, Llama4TextConfig, PhimoeConfig
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_causal_mask_function,
)

from jobrunner.engine.attention.hook import UnservedError
from jobrunner.engine.attention.probe import reach_of, record_calls
from jobrunner.engine.kv import EVERYTHING, Reach
from tests.tiny import shrunk

CPU = torch.device("cpu")


def probed(config, max_model_len: int = 64, device: torch.device = CPU) -> list:
    with device:
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return record_calls(model, device, max_model_len)


@given(length=st.integers(1, 40), size=st.integers(1, 50))
def test_windows_and_chunks_are_read_out_of_mask_functions(length: int, size: int):
    shorter = size < length
    window = reach_of(sliding_window_causal_mask_function(size), length)
    assert window == (Reach(window=size) if shorter else EVERYTHING)
    chunk = reach_of(chunked_causal_mask_function(size, torch.zeros(1, dtype=torch.long)), length)
    same = Reach(window=1) if size == 1 else Reach(chunk=size)
    assert chunk == (same if shorter else EVERYTHING)


def test_a_causal_mask_hides_nothing_before():
    assert reach_of(causal_mask_function, 100) == EVERYTHING


def test_other_masks_are_not_taken_for_a_pattern_of_ours():
    def first_five_see_each_other(batch, head, own, position):
        return (own < 5) & (position < 5)

    def every_other(batch, head, own, position):
        return (position <= own) & (position % 2 == own % 2)

    def nothing(batch, head, own, position):
        return (position < 0) & (own < 0)

    prefix = or_masks(causal_mask_function, first_five_see_each_other)
    for function in (bidirectional_mask_function, prefix, every_other, nothing):
        assert reach_of(function, 20) is None


def test_a_window_that_only_the_mask_knows_is_found():
    assert {call.reach for call in probed(shrunk(PhimoeConfig))} == {Reach(window=9)}


def test_a_window_that_no_row_can_leave_is_none():
    assert {call.reach for call in probed(shrunk(PhimoeConfig), 9)} == {EVERYTHING}


def test_each_call_has_its_own_reach():
    types = ["sliding_attention", "full_attention"]
    calls = probed(shrunk(Gemma2Config, num_hidden_layers=2, layer_types=types))
    assert [call.reach for call in calls] == [Reach(window=9), EVERYTHING]
    types = ["chunked_attention", "full_attention"]
    calls = probed(shrunk(Llama4TextConfig, num_hidden_layers=2, layer_types=types))
    assert [call.reach for call in calls] == [Reach(chunk=9), EVERYTHING]


def test_without_weights_the_shapes_of_the_calls_are_the_same():
    config = shrunk(Gemma2Config)
    without = probed(config, device=torch.device("meta"))
    shapes = [(call.kv_heads, call.key_width, call.value_width) for call in without]
    assert shapes == [(2, 8, 8)] * 4
    assert len(probed(config)) == 4


def test_an_argument_that_we_do_not_know_ends_the_probe():
    model = AutoModelForCausalLM.from_config(shrunk(PhimoeConfig), attn_implementation="eager")
    model.model.register_forward_pre_hook(
        lambda module, arguments, named: (arguments, {**named, "something_new": 3}),
        with_kwargs=True,
    )
    with pytest.raises(UnservedError, match="passes `something_new`"):
        record_calls(model, CPU, 64)
