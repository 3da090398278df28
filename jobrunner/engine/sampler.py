"""Draw one token per row of logits. Knows nothing of models or sequences.

Shapes: B rows, V vocabulary, S rows that are sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import torch

from jobrunner.records import Sampling

# a top-p set is nearly always inside the likeliest few tokens; sorting those is far cheaper
_FIRST_LOOK = 512
# rows drawn at once: bounds the float64 copies of the logits
_ROWS_AT_ONCE = 32


def uniform(draw_key: bytes, position: int) -> float:
    """Return the random number in [0, 1) that belongs to one draw of one row, always the same."""
    digest = blake2b(draw_key + position.to_bytes(8, "little"), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def sample(
    logits_BV: torch.Tensor, samplings: Sequence[Sampling], positions: Sequence[int]
) -> list[int]:
    """Draw the token of each row: the likeliest at temperature 0, else by its keyed draw.

    `positions` are the indices of the drawn tokens in their outputs. A row's token depends on
    nothing but its own logits, sampling and position.
    """
    tokens_B = logits_BV.argmax(dim=-1)
    drawn = [row for row, sampling in enumerate(samplings) if sampling.temperature > 0]
    for first in range(0, len(drawn), _ROWS_AT_ONCE):
        rows = drawn[first : first + _ROWS_AT_ONCE]
        rows_S = torch.tensor(rows, device=logits_BV.device)
        draws = [uniform(samplings[row].draw_key, positions[row]) for row in rows]
        tokens_B[rows_S] = _draw(logits_BV[rows_S], [samplings[row] for row in rows], draws)
    tokens: list[int] = tokens_B.tolist()
    return tokens


def _draw(
    logits_SV: torch.Tensor, samplings: Sequence[Sampling], draws: Sequence[float]
) -> torch.Tensor:
    """Invert the cumulative distribution in the order of the vocabulary.

    The order of the vocabulary, unlike a sort by probability, stays the same when two
    probabilities that are nearly equal change places.
    """

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits_SV.device).unsqueeze(1)

    temperature_S1 = column([sampling.temperature for sampling in samplings])
    # the largest is 0: a tiny temperature makes the others -inf, never NaN
    relative_SV = logits_SV.double() - logits_SV.amax(dim=-1, keepdim=True).double()
    weights_SV = torch.softmax(relative_SV / temperature_S1, dim=-1)
    nucleus = [row for row, sampling in enumerate(samplings) if sampling.top_p < 1]
    if nucleus:
        rows = torch.tensor(nucleus, device=logits_SV.device)
        top_p_N1 = column([samplings[row].top_p for row in nucleus])
        weights_SV[rows] = _nucleus(weights_SV[rows], top_p_N1)
    cumulative_SV = weights_SV.cumsum(dim=-1)
    total_S1 = cumulative_SV[:, -1:]
    # a draw just under 1 may round up to the total, where no token would be found
    below_S1 = torch.nextafter(total_S1, torch.zeros_like(total_S1))
    target_S1 = torch.minimum(column(draws) * total_S1, below_S1)
    return torch.searchsorted(cumulative_SV, target_S1, right=True).squeeze(1)


def _nucleus(weights_NV: torch.Tensor, top_p_N1: torch.Tensor) -> torch.Tensor:
    """Zero all but the likeliest tokens that together reach `top_p`; equal ones stay together."""
    likeliest_NK = weights_NV.topk(min(_FIRST_LOOK, weights_NV.shape[1]), dim=-1).values
    threshold_N1 = _threshold(likeliest_NK, top_p_N1)
    short_N = (likeliest_NK.sum(dim=-1, keepdim=True) < top_p_N1).squeeze(1)
    if bool(short_N.any()):
        sorted_NV = weights_NV[short_N].sort(dim=-1, descending=True).values
        threshold_N1[short_N] = _threshold(sorted_NV, top_p_N1[short_N])
    return weights_NV.where(weights_NV >= threshold_N1, 0.0)


def _threshold(sorted_NK: torch.Tensor, top_p_N1: torch.Tensor) -> torch.Tensor:
    """The least probability inside the smallest set that reaches `top_p`."""
    before_NK = sorted_NK.cumsum(dim=-1) - sorted_NK
    kept_N1 = (before_NK < top_p_N1).sum(dim=-1, keepdim=True).clamp(min=1)
    return sorted_NK.gather(1, kept_N1 - 1)
