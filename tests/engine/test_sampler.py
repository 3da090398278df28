"""Drawing tokens: greedy, temperature, top-p, keyed draws."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jobrunner.engine.sampler import sample, uniform
from jobrunner.records import Sampling

GREEDY = Sampling(1)


def drawn(temperature: float = 1.0, top_p: float = 1.0, key: bytes = b"k") -> Sampling:
    return Sampling(1, temperature=temperature, top_p=top_p, draw_key=key)


def chi_square(observed: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((observed - expected) ** 2 / expected).sum())


def counts(logits: torch.Tensor, sampling: Sampling, draws: int) -> torch.Tensor:
    rows = logits.expand(draws, -1)
    tokens = sample(rows, [sampling] * draws, list(range(draws)))
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
    assert sample(torch.tensor([[0.0, 3.0, 1.0], [5.0, 4.0, 1.0]]), [GREEDY] * 2, [0, 0]) == [1, 0]


def test_no_rows_no_tokens():
    assert sample(torch.empty(0, 7), [], []) == []


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


def test_the_least_top_p_is_greedy():
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(1))
    assert sample(logits, [drawn(top_p=1e-9)] * 5, [0] * 5) == logits.argmax(dim=-1).tolist()


def test_a_tiny_temperature_is_greedy():
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(1))
    assert sample(logits, [drawn(1e-6)] * 5, [0] * 5) == logits.argmax(dim=-1).tolist()


def test_a_wide_nucleus_over_a_large_vocabulary_is_found():
    logits = torch.zeros(1, 3000)
    tokens = {sample(logits, [drawn(top_p=0.9)], [position])[0] for position in range(300)}
    assert max(tokens) > 2000


def test_a_row_depends_on_nothing_but_itself():
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(70, 1000, generator=generator)
    samplings = [
        GREEDY if row % 3 == 0 else drawn(0.5 + row / 40, 1.0 if row % 2 else 0.95, bytes([row]))
        for row in range(70)
    ]
    together = sample(logits, samplings, list(range(70)))
    alone = [sample(logits[row : row + 1], [samplings[row]], [row])[0] for row in range(70)]
    order = list(reversed(range(70)))
    turned = sample(logits[order], [samplings[row] for row in order], order)
    assert together == alone == list(reversed(turned))


@settings(max_examples=100, deadline=None)
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
    assert sample(torch.tensor([row]), [sampling], [position]) == [expected]


def test_the_smallest_temperature_draws_a_token_that_exists():
    logits_BV = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    [token] = sample(logits_BV, [Sampling(8, temperature=1e-320, draw_key=b"k")], [0])
    assert token == int(logits_BV.argmax())
