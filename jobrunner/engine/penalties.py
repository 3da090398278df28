"""Change logits by what a text holds already. Knows nothing of drawing or of sequences.

Shapes: S rows that are looked at together, V vocabulary, P places: one for each token whose
logit changes in a row.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import torch

from jobrunner.engine.devices import to_device
from jobrunner.engine.draws import Draw

_MOST = torch.finfo(torch.float32).max


def penalise(logits_SV: torch.Tensor, draws: Sequence[Draw]) -> None:
    """Apply repetition, presence and frequency penalties in place, to tokens that occurred.

    Repetition as RepetitionPenaltyLogitsProcessor of transformers: a logit of a token of prompt
    or output is multiplied where it is below 0, else divided. Then, as OpenAI's API defines them
    and vLLM computes them, of the output alone: `presence + frequency * count` is subtracted.
    """
    rows = [row for row, draw in enumerate(draws) if draw.occurrences]
    seen = [draw.occurrences for draw in draws if draw.occurrences]
    if not rows:
        return
    rows_P, tokens_P, counts_P = _places(
        rows, [each.tokens for each in seen], [each.counts for each in seen], logits_SV
    )
    samplings = [draw.sampling for draw in draws]
    repetition_P = _tensor([s.repetition_penalty for s in samplings], logits_SV)[rows_P]
    presence_P = _tensor([s.presence_penalty for s in samplings], logits_SV)[rows_P]
    frequency_P = _tensor([s.frequency_penalty for s in samplings], logits_SV)[rows_P]
    logits_P = logits_SV[rows_P, tokens_P].double()
    logits_P = torch.where(logits_P < 0, logits_P * repetition_P, logits_P / repetition_P)
    logits_P -= presence_P * (counts_P > 0) + frequency_P * counts_P
    # a logit divided by next to nothing stays a number: infinity minus infinity is none
    logits_SV[rows_P, tokens_P] = logits_P.clamp(max=_MOST).to(logits_SV.dtype)


def forbid_ends(logits_SV: torch.Tensor, draws: Sequence[Draw]) -> None:
    """Put the logits of stop ids to -inf, in place, for the first `min_new_tokens` of a text.

    As MinNewTokensLengthLogitsProcessor of transformers, except that a row in which no other
    token is possible keeps its logits: something must be drawn.
    """
    early = [
        row
        for row, draw in enumerate(draws)
        if draw.position < draw.sampling.min_new_tokens and draw.sampling.stop_ids
    ]
    if not early:
        return
    ends = [array("q", sorted(draws[row].sampling.stop_ids)) for row in early]
    rows_P, tokens_P, _ = _places(early, ends, ends, logits_SV)
    logits_P = logits_SV[rows_P, tokens_P]
    logits_SV[rows_P, tokens_P] = -torch.inf
    nothing_left_S = logits_SV.amax(dim=-1) == -torch.inf
    logits_SV[rows_P, tokens_P] = logits_P.where(nothing_left_S[rows_P], -torch.inf)


def _places(
    rows: Sequence[int],
    tokens: Sequence[array[int]],
    numbers: Sequence[array[int]],
    logits_SV: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Lay the tokens of all rows end to end, each with its row and its number, `[P]` each.

    Tokens that the logits have no place for are left out: such an index would end the device.
    """
    places_3P = np.stack(
        [
            np.repeat(np.array(rows, np.int64), [len(each) for each in tokens]),
            np.concatenate([np.frombuffer(each, np.int64) for each in tokens]),
            np.concatenate([np.frombuffer(each, np.int64) for each in numbers]),
        ]
    )
    places_3P = places_3P[:, places_3P[1] < logits_SV.shape[1]]
    rows_P, tokens_P, numbers_P = to_device(places_3P, logits_SV.device).unbind()
    return rows_P, tokens_P, numbers_P


def _tensor(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return to_device(np.array(values, np.float64), like.device)
