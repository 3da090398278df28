"""`generate` as a contender: its answers, and its steps counted as ours are."""

import pytest
import torch

from jobrunner.config import BatchingTable
from jobrunner.engine.attention.hook import NAME
from jobrunner.engine.loading import place_model, prove_model
from jobrunner.engine.peak_memory import PeakMemory
from jobrunner.engine.reference import generate_steps
from jobrunner.engine.scheduler import Limits
from jobrunner.records import Request, RowId, Sampling
from tests.fakes import FakeClock
from tests.tiny import tiny_llama

LIMITS = Limits(max_batch_size=4, token_budget=64, chunk_size=64, lookahead=16)


@pytest.fixture(scope="module")
def placed(tmp_path_factory):
    folder = tiny_llama(tmp_path_factory.mktemp("models") / "tiny")
    proven = prove_model(folder, dtype="float32", device="cpu")
    return place_model(proven, LIMITS, BatchingTable(), kv_memory=2**20)


def request(index, prompt, most, ends=()):
    return Request(RowId("a", index), prompt, Sampling(most, stop_ids=frozenset(ends)))


def alone(model, prompt, count):
    """The likeliest tokens one by one, without any cache."""
    tokens = list(prompt)
    for _ in range(count):
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def answers(steps):
    return {c.id.index: list(c.tokens) for step in steps for c in step.completions}


def test_each_row_gets_its_own_length_and_the_tokens_it_would_get_alone(placed):
    batches = [[request(0, [5, 6, 7], 4), request(1, [9], 2)], [request(2, [3, 4], 3)]]
    found = answers(generate_steps(placed, batches))
    model = placed.model
    model.set_attn_implementation("eager")
    assert found == {
        0: alone(model, [5, 6, 7], 4),
        1: alone(model, [9], 2),
        2: alone(model, [3, 4], 3),
    }


def test_a_row_ends_with_its_end_token(placed):
    (long,) = answers(generate_steps(placed, [[request(0, [5, 6, 7], 6)]])).values()
    end = long[2]
    steps = list(generate_steps(placed, [[request(0, [5, 6, 7], 6, ends=[end])]]))
    assert answers(steps) == {0: long[: long.index(end) + 1]}
    assert steps[-1].completions[0].finish_reason == "stop"


def test_what_is_padded_and_what_is_wanted_is_counted(placed):
    batch = [request(0, [5, 6, 7], 4), request(1, [9], 2)]
    prefill, *decodes = generate_steps(placed, [batch])
    assert (prefill.prefill_tokens, prefill.tokens_computed, prefill.tokens_padded) == (4, 6, 2)
    assert [step.batch_size for step in decodes] == [2, 1, 1]
    assert [step.tokens_computed for step in decodes] == [2, 2, 2]
    assert [step.tokens_padded for step in decodes] == [0, 1, 1]
    assert prefill.output_tokens + sum(step.output_tokens for step in decodes) == 6
    assert len(decodes[-1].completions) == 2


def test_rows_leave_with_their_batch_and_wait_for_those_before(placed):
    batches = [[request(0, [5, 6, 7], 4), request(1, [9], 2)], [request(2, [3], 1)]]
    steps = list(generate_steps(placed, batches, FakeClock()))
    first, second, third = (c for step in steps for c in step.completions)
    # the clock moves by a second a look: when asked, when a batch begins, at each token
    assert (first.queue_s, first.prefill_s, first.decode_s) == (1.0, 1.0, 3.0)
    assert (second.queue_s, second.prefill_s, second.decode_s) == (1.0, 1.0, 3.0)
    assert (third.queue_s, third.prefill_s, third.decode_s) == (6.0, 1.0, 0.0)
    assert second.longest_gap_s == 1.0


def test_afterwards_the_model_attends_as_before(placed):
    own = placed.model.generation_config
    list(generate_steps(placed, [[request(0, [5], 1)]]))
    assert placed.model.config._attn_implementation == NAME
    assert placed.model.generation_config is own


def test_memory_is_the_most_since_the_beginning():
    memory = PeakMemory("cpu")
    memory.begin()
    first = memory.peak_bytes()
    if first is None:
        pytest.skip("this system does not tell")
    held = bytearray(64 << 20)
    del held
    assert memory.grown_bytes() > 60 << 20
    memory.begin()
    assert memory.grown_bytes() < 32 << 20
