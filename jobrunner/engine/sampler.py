"""Draw one token per row of logits. Knows nothing of models or sequences.

Shapes: B rows, V vocabulary, S rows that are looked at together, N those of them that a rule
applies to, K likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import torch

from jobrunner.engine.devices import to_device
from jobrunner.engine.draws import Draw
from jobrunner.engine.penalties import forbid_ends, penalise
from jobrunner.records import Sampling

# a top-p set is nearly always inside the likeliest few tokens; sorting those is far cheaper
_FIRST_LOOK = 512
# rows drawn at once: bounds the float64 copies of the logits
_ROWS_AT_ONCE = 32
# logits that are searched for the place of their maximum
_WINDOW = 256


def uniform(draw_key: bytes, position: int) -> float:
    """Return the random number in [0, 1) that belongs to one draw of one row, always the same."""
    digest = blake2b(draw_key + position.to_bytes(8, "little"), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def sample_on_device(
    logits_BV: torch.Tensor, draws: Sequence[Draw | None], likeliest_B: torch.Tensor
) -> torch.Tensor:
    """Draw the token of each row: the likeliest at temperature 0, else by its keyed draw; `[B]`.

    None stands for the likeliest without any rule, and costs nothing but that.

    A row's token depends on nothing but its own logits and draw. Its logits go through
    penalties -> min_new_tokens -> temperature -> top_k -> top_p -> min_p, in the order and with
    the meaning of the logits processors of these names in transformers' `generate`; presence and
    frequency penalties, which it lacks, are those of OpenAI's API. The logits given stay as they
    are.
    """
    ruled = [(row, draw) for row, draw in enumerate(draws) if draw is not None and draw.ruled]
    tokens_B = likeliest_B.clone() if ruled else likeliest_B
    drawn = [(row, draw) for row, draw in ruled if draw.sampling.temperature > 0]
    greedy = [(row, draw) for row, draw in ruled if draw.sampling.temperature == 0]
    for choose, rows in ((_most, greedy), (_draw, drawn)):
        for first in range(0, len(rows), _ROWS_AT_ONCE):
            numbers, some = zip(*rows[first : first + _ROWS_AT_ONCE], strict=True)
            rows_S = to_device(np.array(numbers), logits_BV.device)
            logits_SV = logits_BV[rows_S].float()
            penalise(logits_SV, some)
            forbid_ends(logits_SV, some)
            tokens_B[rows_S] = choose(logits_SV, some)
    return tokens_B


def likeliest(logits_BV: torch.Tensor) -> torch.Tensor:
    """Return the argmax of each row, `[B]`; of equal ones the first, of a row with NaN that one.

    A wider type holds every number of a narrow one: this is the argmax in float32 too.
    """
    width = logits_BV.shape[1]
    if logits_BV.device.type != "cpu" or width < 2 * _WINDOW:
        return logits_BV.argmax(dim=-1)
    # a CPU finds the maximum many times faster than its place: look for that in one window
    whole = width - width % _WINDOW
    most_BN = logits_BV[:, :whole].unflatten(1, (-1, _WINDOW)).amax(dim=-1)
    if whole < width:
        most_BN = torch.cat([most_BN, logits_BV[:, whole:].amax(dim=-1, keepdim=True)], dim=1)
    # the last window overlaps the one before, which would have been taken for an equal logit
    start_B = (most_BN.float().argmax(dim=-1) * _WINDOW).clamp(max=width - _WINDOW)
    places_BN = start_B.unsqueeze(1) + torch.arange(_WINDOW)
    return start_B + logits_BV.gather(1, places_BN).float().argmax(dim=-1)


def _most(logits_SV: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    return logits_SV.argmax(dim=-1)


def _draw(logits_SV: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Invert the cumulative distribution in the order of the vocabulary.

    The order of the vocabulary, unlike a sort by probability, stays the same when two
    probabilities that are nearly equal change places.
    """
    weights_SV = weights(logits_SV, [draw.sampling for draw in draws])
    cumulative_SV = weights_SV.cumsum(dim=-1)
    total_S1 = cumulative_SV[:, -1:]
    # a draw just under 1 may round up to the total, where no token would be found
    below_S1 = torch.nextafter(total_S1, torch.zeros_like(total_S1))
    numbers = [uniform(draw.sampling.draw_key, draw.position) for draw in draws]
    target_S1 = torch.minimum(_column(numbers, logits_SV) * total_S1, below_S1)
    return torch.searchsorted(cumulative_SV, target_S1, right=True).squeeze(1)


def weights(logits_SV: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """Weigh the tokens of each row for a draw, in float64: by temperature, top_k, top_p, min_p.

    A token that is cut weighs 0, what is left is in proportion. Tokens as likely as the last one
    that top_k or top_p keeps stay with it.
    """
    temperature_S1 = _column([sampling.temperature for sampling in samplings], logits_SV)
    # the largest is 0: a tiny temperature makes the others -inf, never NaN
    relative_SV = logits_SV.double() - logits_SV.amax(dim=-1, keepdim=True).double()
    _keep_likeliest(relative_SV, [sampling.top_k for sampling in samplings])
    weights_SV = torch.softmax(relative_SV / temperature_S1, dim=-1)
    nucleus = [row for row, sampling in enumerate(samplings) if sampling.top_p < 1]
    if nucleus:
        rows_N = to_device(np.array(nucleus), logits_SV.device)
        top_p_N1 = _column([samplings[row].top_p for row in nucleus], logits_SV)
        weights_SV[rows_N] = _nucleus(weights_SV[rows_N], top_p_N1)
    if any(sampling.min_p for sampling in samplings):
        min_p_S1 = _column([sampling.min_p for sampling in samplings], logits_SV)
        least_S1 = min_p_S1 * weights_SV.amax(dim=-1, keepdim=True)
        weights_SV.masked_fill_(weights_SV < least_S1, 0.0)
    return weights_SV


def _keep_likeliest(logits_SV: torch.Tensor, top_k: Sequence[int]) -> None:
    """Put all but the `top_k` largest of each row to -inf, in place; 0 keeps all."""
    vocabulary = logits_SV.shape[1]
    cut = [row for row, count in enumerate(top_k) if 0 < count < vocabulary]
    if not cut:
        return
    rows_N = to_device(np.array(cut), logits_SV.device)
    last_N1 = to_device(np.array([[top_k[row] - 1] for row in cut]), logits_SV.device)
    largest_NK = logits_SV[rows_N].topk(max(top_k[row] for row in cut), dim=-1).values
    least_S1 = logits_SV.new_full((logits_SV.shape[0], 1), -torch.inf)
    least_S1[rows_N] = largest_NK.gather(1, last_N1)
    logits_SV.masked_fill_(logits_SV < least_S1, -torch.inf)


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


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return to_device(np.array(values, np.float64), like.device).unsqueeze(1)
