"""Penalties and held-back ends: equal to transformers' own processors and to plain Python."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import MinNewTokensLengthLogitsProcessor, RepetitionPenaltyLogitsProcessor

from jobrunner.engine.draws import Draw, Occurrences, occurrences
from jobrunner.engine.penalties import forbid_ends, penalise
from jobrunner.records import Sampling
from tests.engine.test_sampler import sample
from tests.properties import examples

SETTINGS = examples(100)
VOCABULARY = 12
tokens_strategy = st.lists(st.integers(0, VOCABULARY - 1), max_size=20)
logit_rows = st.lists(
    st.sampled_from([-torch.inf, -3.5, -1.0, -0.25, 0.0, 0.5, 2.0, 7.25]),
    min_size=VOCABULARY,
    max_size=VOCABULARY,
)


def draw(sampling: Sampling, prompt=(), output=()) -> Draw:
    return Draw(sampling, len(output), occurrences(sampling, prompt, output))


def penalised(logits: list[float], *draws: Draw) -> torch.Tensor:
    rows = torch.tensor([logits] * len(draws))
    penalise(rows, draws)
    return rows


@SETTINGS
@given(logit_rows, tokens_strategy, tokens_strategy, st.floats(0.1, 3))
def test_repetition_penalty_equals_that_of_transformers(logits, prompt, output, penalty):
    sampling = Sampling(9, repetition_penalty=penalty)
    expected = torch.tensor([logits])
    if prompt or output:
        processor = RepetitionPenaltyLogitsProcessor(penalty)
        expected = processor(torch.tensor([prompt + output]), expected)
    torch.testing.assert_close(penalised(logits, draw(sampling, prompt, output)), expected)


@SETTINGS
@given(
    logit_rows,
    tokens_strategy,
    tokens_strategy,
    st.floats(0.5, 2),
    st.floats(-2, 2),
    st.floats(-2, 2),
)
def test_all_penalties_together_equal_a_slow_reference(
    logits, prompt, output, repetition, presence, frequency
):
    expected = []
    for token, logit in enumerate(logits):
        value = logit
        if token in prompt or token in output:
            value = value * repetition if value < 0 else value / repetition
        count = output.count(token)
        expected.append(value - frequency * count - presence * (count > 0))
    sampling = Sampling(
        9,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
    )
    actual = penalised(logits, draw(sampling, prompt, output))
    torch.testing.assert_close(actual, torch.tensor([expected]))


def test_presence_and_frequency_do_not_look_at_the_prompt():
    sampling = Sampling(9, presence_penalty=1, frequency_penalty=0.5)
    actual = penalised([0.0] * 3, draw(sampling, prompt=[0, 1], output=[1, 1]))
    assert actual.tolist() == [[0, -2, 0]]


def test_each_row_has_its_own_penalties():
    rows = (
        draw(Sampling(9), output=[0, 1]),
        draw(Sampling(9, presence_penalty=1), output=[0, 1]),
        draw(Sampling(9, frequency_penalty=1)),
        draw(Sampling(9, repetition_penalty=2.0), prompt=[0]),
    )
    assert penalised([1.0, 1.0], *rows).tolist() == [[1, 1], [0, 0], [1, 1], [0.5, 1]]


def test_penalties_hold_for_greedy_rows():
    greedy = draw(Sampling(9, presence_penalty=2), output=[1])
    assert sample(torch.tensor([[1.0, 2.0]]), [greedy]) == [0]


def test_the_least_repetition_penalty_leaves_numbers():
    sampling = Sampling(9, temperature=1.0, repetition_penalty=5e-324)
    rows = penalised([-1.0, 0.0, 2.0, 3.0], draw(sampling, prompt=[0, 1, 2, 3]))
    assert rows.isfinite().all()
    assert sample(torch.tensor([[-1.0, 0.0, 2.0]]), [draw(sampling, prompt=[0, 1, 2])]) == [2]


def test_a_token_beyond_the_logits_is_left_out():
    sampling = Sampling(9, repetition_penalty=2.0, min_new_tokens=3, stop_ids=frozenset({1, 1000}))
    rows = penalised([4.0, 2.0], draw(sampling, prompt=[0, 2, 1000]))
    assert rows.tolist() == [[2, 2]]
    forbid_ends(rows, [draw(sampling)])
    assert rows.tolist() == [[2, -torch.inf]]


@SETTINGS
@given(
    logits=st.lists(st.floats(-5, 5, width=32), min_size=VOCABULARY, max_size=VOCABULARY),
    ends=st.sets(st.integers(0, VOCABULARY - 1), min_size=1, max_size=VOCABULARY - 1),
    minimum=st.integers(1, 4),
    position=st.integers(0, 5),
)
def test_held_back_ends_equal_those_of_transformers(logits, ends, minimum, position):
    processor = MinNewTokensLengthLogitsProcessor(3, minimum, sorted(ends))
    expected = processor(torch.zeros(1, 3 + position), torch.tensor([logits]))
    sampling = Sampling(9, min_new_tokens=minimum, stop_ids=frozenset(ends))
    rows = torch.tensor([logits])
    forbid_ends(rows, [Draw(sampling, position)])
    assert torch.equal(rows, expected)


def test_where_nothing_but_ends_is_possible_the_likeliest_is_drawn():
    every = Sampling(9, min_new_tokens=3, stop_ids=frozenset(range(3)))
    some = Sampling(9, min_new_tokens=3, stop_ids=frozenset({1, 2}))
    logits = torch.tensor([[0.0, 2.0, 1.0], [-torch.inf, 2.0, 1.0], [0.0, 2.0, 1.0]])
    assert sample(logits, [Draw(every), Draw(some), Draw(some)]) == [1, 1, 0]


@SETTINGS
@given(tokens_strategy, tokens_strategy)
def test_occurrences_count_the_output_and_hold_the_prompt(prompt, output):
    seen = Occurrences(prompt, output[:3])
    for token in output[3:]:
        seen.add(token)
    counted = dict(zip(seen.tokens, seen.counts, strict=True))
    assert counted == {token: output.count(token) for token in {*prompt, *output}}
    assert len(seen) == len(counted)


def test_nothing_is_counted_without_penalties():
    assert occurrences(Sampling(9, temperature=1.0, top_k=3, min_new_tokens=2), [1], [2]) is None
