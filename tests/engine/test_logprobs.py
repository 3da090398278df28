"""Log-probabilities: those of the logits as they are, the likeliest in one fixed order."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st

from jobrunner.engine.logprobs import look, read
from jobrunner.records import TokenLogprob
from tests.properties import examples


def token_logprobs(
    logits_BV: torch.Tensor, tokens: Sequence[int], wanted: Sequence[int | None]
) -> list[TokenLogprob | None]:
    """Look and read at once, as a launch and its read-back do."""
    looked = look(logits_BV, torch.tensor(tokens), wanted)
    return read([some.to_host() for some in looked], len(tokens))


@examples(150)
@given(
    logits=st.lists(
        st.sampled_from([-math.inf, -8.0, -1.5, -0.0, 0.0, 0.125, 3.0]) | st.floats(-50, 50),
        min_size=1,
        max_size=30,
    ).filter(lambda row: max(row) > -math.inf),
    count=st.integers(0, 35),
    data=st.data(),
)
def test_log_probabilities_equal_a_slow_reference(logits, count, data):
    logits = torch.tensor(logits).tolist()
    token = data.draw(st.integers(0, len(logits) - 1))
    total = math.log(math.fsum(math.exp(logit - max(logits)) for logit in logits)) + max(logits)
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))[:count]
    [found] = token_logprobs(torch.tensor([logits]), [token], [count])
    assert found is not None
    assert found.token == token
    assert [each for each, _ in found.top] == order
    torch.testing.assert_close(
        [found.logprob, *(logprob for _, logprob in found.top)],
        [logits[token] - total, *(logits[each] - total for each in order)],
        rtol=1e-5,
        atol=1e-5,
    )


def test_a_token_without_a_chance_has_minus_infinity():
    [found] = token_logprobs(torch.tensor([[-math.inf, 0.0]]), [1], [2])
    assert found == TokenLogprob(1, 0.0, ((1, 0.0), (0, -math.inf)))


def test_only_rows_that_want_some_get_some():
    logits = torch.tensor([[0.0, 0.0]]).repeat(3, 1)
    half = -math.log(2)
    first, second, third = token_logprobs(logits, [0, 1, 1], [None, 0, 1])
    assert first is None
    assert second == TokenLogprob(1, torch.tensor(half).item())
    assert third == second._replace(top=((0, torch.tensor(half).item()),))


def test_where_nobody_wants_any_there_is_nothing():
    assert token_logprobs(torch.zeros(2, 3), [0, 1], [None, None]) == []


def test_a_row_depends_on_nothing_but_itself():
    # in bfloat16 many are equal
    logits = torch.randn(70, 500, generator=torch.Generator().manual_seed(0)).bfloat16()
    wanted = [None if row % 5 == 4 else row % 5 * 5 for row in range(70)]
    tokens = [row % 13 for row in range(70)]
    together = token_logprobs(logits, tokens, wanted)
    turned = token_logprobs(logits.flip(0), tokens[::-1], wanted[::-1])
    assert together == turned[::-1]
    for row in range(0, 70, 7):
        alone = token_logprobs(logits[row : row + 1], tokens[row : row + 1], wanted[row : row + 1])
        assert (alone or [None]) == [together[row]]
