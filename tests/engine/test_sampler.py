"""Drawing tokens: greedy, temperature, top-k, top-p, min-p, keyed draws, mixed in one batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from jobrunner.engine.draws import Draw, Occurrences
from jobrunner.engine.sampler import likeliest, sample_on_device, uniform, weights
from jobrunner.records import Sampling
from tests.properties import examples

GREEDY = Sampling(1)


def drawn(
    temperature: float = 1.0, top_p: float = 1.0, key: bytes = b"k", **more: float
) -> Sampling:
    return Sampling(1, temperature=temperature, top_p=top_p, draw_key=key, **more)  # type: ignore[arg-type]


def sample(logits: torch.Tensor, draws: Sequence[Draw | None]) -> list[int]:
    return sample_on_device(logits, draws, likeliest(logits)).tolist()


def sampled(
    logits: torch.Tensor, samplings: Sequence[Sampling], positions: Sequence[int]
) -> list[int]:
    return sample(logits, [Draw(*pair) for pair in zip(samplings, positions, strict=True)])


def chi_square(observed: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((observed - expected) ** 2 / expected).sum())


def counts(logits: torch.Tensor, sampling: Sampling, draws: int) -> torch.Tensor:
    rows = logits.expand(draws, -1)
    tokens = sampled(rows, [sampling] * draws, range(draws))
    return torch.bincount(torch.tensor(tokens), minlength=logits.shape[0]).double()


def slow_reference(logits: list[float], sampling: Sampling, position: int) -> int:
    """Sort, keep the smallest set that reaches top-p, walk the vocabulary; in plain Python."""
    top = max(logits)
    weights = [math.exp((logit - top) / sampling.temperature) for logit in logits]
    total = sum(weights)
    weights = [weight / total for weight in weights]
    kept, mass = set(), 0.0
    for token in sorted(range(len(weights)), key=lambda token: -weights[token]):
        if mass >= sampling.top_p:
            break
        kept.add(token)
        mass += weights[token]
    left = uniform(sampling.draw_key, position) * mass
    for token in sorted(kept):
        left -= weights[token]
        if left < 0:
            return token
    return max(kept)


def test_greedy_takes_the_likeliest():
    assert sampled(torch.tensor([[0.0, 3.0, 1.0], [5.0, 4.0, 1.0]]), [GREEDY] * 2, [0, 0]) == [1, 0]


def test_no_rows_no_tokens():
    assert sampled(torch.empty(0, 7), [], []) == []


def test_the_uniform_number_depends_on_key_and_position_alone():
    assert uniform(b"a", 3) == uniform(b"a", 3)
    assert len({uniform(b"a", 3), uniform(b"a", 4), uniform(b"b", 3)}) == 3
    assert all(0 <= uniform(b"a", position) < 1 for position in range(1000))


def test_uniform_numbers_are_uniform():
    numbers = torch.tensor([uniform(b"key", position) for position in range(20_000)])
    observed = torch.histc(numbers, bins=20, min=0, max=1)
    # 19 degrees of freedom: 43.8 is passed by chance once in a thousand keys
    assert chi_square(observed, torch.full((20,), 1000.0)) < 43.8


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_draws_follow_the_distribution(temperature: float):
    logits = torch.linspace(-2, 2, 16)[torch.randperm(16, generator=torch.Generator())]
    observed = counts(logits, drawn(temperature), 20_000)
    expected = 20_000 * torch.softmax(logits.double() / temperature, dim=0)
    # 15 degrees of freedom: 37.7 is passed by chance once in a thousand keys
    assert chi_square(observed, expected) < 37.7


def test_top_p_keeps_the_smallest_set_and_its_proportions():
    probabilities = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15])
    observed = counts(probabilities.log(), drawn(top_p=0.8), 20_000)
    assert observed[[0, 2]].sum() == 0
    expected = 20_000 * torch.tensor([0.4, 0.3, 0.15], dtype=torch.float64) / 0.85
    # 2 degrees of freedom, once in a thousand keys
    assert chi_square(observed[[1, 3, 4]], expected) < 13.8


def test_a_tiny_temperature_is_greedy():
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(1))
    assert sampled(logits, [drawn(1e-6)] * 5, [0] * 5) == logits.argmax(dim=-1).tolist()


def test_a_wide_nucleus_over_a_large_vocabulary_is_found():
    logits = torch.zeros(1, 3000)
    tokens = {sampled(logits, [drawn(top_p=0.9)], [position])[0] for position in range(300)}
    assert max(tokens) > 2000


def mixed_draw(row: int, vocabulary: int) -> Draw:
    """A draw with some of all the rules, another for each row."""
    generator = torch.Generator().manual_seed(row)
    seen = torch.randint(vocabulary, (30,), generator=generator).tolist()
    sampling = Sampling(
        9,
        temperature=[0.0, 0.5 + row / 40][row % 3 > 0],
        top_p=[1.0, 0.95][row % 2],
        top_k=[0, 1, 40, vocabulary + 1, 7][row % 5],
        min_p=[0.0, 0.02, 0.0][row % 3],
        repetition_penalty=[1.0, 1.3, 0.8, 1.0][row % 4],
        presence_penalty=[0.0, 0.5][row % 7 == 1],
        frequency_penalty=[0.0, -0.2][row % 7 == 2],
        min_new_tokens=[0, 5][row % 11 == 3],
        stop_ids=frozenset(range(row)),
        draw_key=bytes([row]),
    )
    penalised = row % 4 in (1, 2) or row % 7 in (1, 2)
    return Draw(sampling, row % 6, Occurrences(seen[:20], seen[20:]) if penalised else None)


def test_case_P_a_row_depends_on_nothing_but_itself():
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(70, 1000, generator=generator)
    draws = [mixed_draw(row, 1000) for row in range(70)]
    together = sample(logits, draws)
    alone = [sample(logits[row : row + 1], [draws[row]])[0] for row in range(70)]
    order = torch.randperm(70, generator=generator).tolist()
    turned = sample(logits[order], [draws[row] for row in order])
    assert together == alone
    assert turned == [together[row] for row in order]
    for size in (2, 4, 33):
        parts: list[int] = []
        for first in range(0, 70, size):
            parts += sample(logits[first : first + size], draws[first : first + size])
        assert parts == together


def test_the_logits_given_stay_as_they_are():
    logits = torch.randn(40, 100, generator=torch.Generator().manual_seed(3))
    before = logits.clone()
    sample(logits, [mixed_draw(row, 100) for row in range(40)])
    assert torch.equal(logits, before)


def test_logits_of_inference_mode_can_be_sampled():
    with torch.inference_mode():
        logits = torch.randn(12, 100)
    assert len(sample(logits, [mixed_draw(row, 100) for row in range(12)])) == 12


class Operations(TorchDispatchMode):
    """Notes the tensor operations that are run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.names.append(operation.name())
        return operation(*args, **(kwargs or {}))


def test_greedy_rows_without_rules_cost_one_argmax():
    logits = torch.randn(50, 100)
    with Operations() as operations:
        sample(logits, [None] * 25 + [Draw(GREEDY)] * 25)
    assert operations.names == ["aten::argmax"]


@examples(150)
@given(
    logits=st.lists(st.integers(-40, 40), min_size=1, max_size=40, unique=True),
    temperature=st.floats(0.2, 3),
    top_k=st.integers(0, 45),
    top_p=st.integers(1, 100),
    min_p=st.integers(0, 100),
)
def test_weights_equal_those_of_transformers(logits, temperature, top_k, top_p, min_p):
    sampling = drawn(temperature, top_p / 100, top_k=top_k, min_p=min_p / 100)
    row = torch.tensor([logits], dtype=torch.float64) / 8
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 100:
        warpers.append(TopPLogitsWarper(top_p / 100))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p / 100))
    expected = torch.softmax(warpers(torch.empty(1, 0), row), dim=-1)
    actual = weights(row.clone(), [sampling])
    assert torch.equal(actual > 0, expected > 0)
    torch.testing.assert_close(actual / actual.sum(), expected)


def test_top_k_keeps_so_many_and_their_proportions():
    probabilities = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15])
    observed = counts(probabilities.log(), drawn(top_k=3), 20_000)
    assert observed[[0, 2]].sum() == 0
    expected = 20_000 * torch.tensor([0.4, 0.3, 0.15], dtype=torch.float64) / 0.85
    # 2 degrees of freedom, once in a thousand keys
    assert chi_square(observed[[1, 3, 4]], expected) < 13.8


def test_min_p_keeps_what_is_not_far_below_the_likeliest():
    probabilities = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15])
    observed = counts(probabilities.log(), drawn(min_p=0.3), 20_000)
    assert observed[[0, 2]].sum() == 0
    expected = 20_000 * torch.tensor([0.4, 0.3, 0.15], dtype=torch.float64) / 0.85
    # 2 degrees of freedom, once in a thousand keys
    assert chi_square(observed[[1, 3, 4]], expected) < 13.8


def test_top_p_counts_what_top_k_has_left():
    # of the two that are left, the first has 0.8; of all, 0.52
    logits = torch.tensor([[0.4, 0.1, 0.09, 0.09, 0.09]]).log()
    kept = weights(logits, [drawn(top_p=0.75, top_k=2)]) > 0
    assert kept.tolist() == [[True, False, False, False, False]]


@pytest.mark.parametrize("rule", [{"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-9}])
def test_the_tightest_cut_is_greedy(rule):
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(1))
    tokens = sampled(logits, [drawn(**rule)] * 5, [0] * 5)
    assert tokens == logits.argmax(dim=-1).tolist()


@examples(100)
@given(
    logits=st.lists(st.integers(-40, 40), min_size=1, max_size=40, unique=True),
    temperature=st.floats(0.2, 3),
    top_p=st.floats(0.01, 1),
    position=st.integers(0, 1000),
)
def test_the_draw_equals_a_slow_reference(logits, temperature, top_p, position):
    sampling = drawn(temperature, top_p)
    row = [logit / 8 for logit in logits]
    expected = slow_reference(row, sampling, position)
    assert sampled(torch.tensor([row]), [sampling], [position]) == [expected]


def test_the_smallest_temperature_draws_a_token_that_exists():
    logits_BV = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    [token] = sampled(logits_BV, [Sampling(8, temperature=1e-320, draw_key=b"k")], [0])
    assert token == int(logits_BV.argmax())


@given(
    width=st.sampled_from([1, 7, 255, 256, 511, 512, 513, 767, 768, 1000]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 10_000),
    special=st.sampled_from([None, math.nan, math.inf, -math.inf]),
    levels=st.sampled_from([1, 2, 5, 1000]),
)
def test_the_likeliest_is_the_first_maximum_in_float32(width, dtype, seed, special, levels):
    generator = torch.Generator().manual_seed(seed)
    # few levels: many logits are equal
    logits_BV = torch.randint(levels, (4, width), generator=generator).to(dtype)
    if special is not None:
        places = torch.randint(width, (3,), generator=generator)
        logits_BV[1, places] = special
        logits_BV[2] = special
    assert torch.equal(likeliest(logits_BV), logits_BV.float().argmax(dim=-1))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_ruled_rows_of_narrow_logits_are_looked_at_in_float32(temperature):
    generator = torch.Generator().manual_seed(3)
    logits_BV = torch.randn(8, 600, generator=generator).bfloat16()
    sampling = drawn(temperature, top_k=50, presence_penalty=0.3, frequency_penalty=0.1)
    draws = [Draw(sampling, row, Occurrences((), [1, 2, 3, 3])) for row in range(8)]
    assert sample(logits_BV, draws) == sample(logits_BV.float(), draws)
