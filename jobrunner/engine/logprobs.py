"""Log-probabilities of drawn tokens and of the likeliest. Knows nothing of how they were drawn.

Shapes: B rows, V vocabulary, L rows whose log-probabilities are wanted, K likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from jobrunner.records import TokenLogprob

# rows looked at together: bounds the copies of the logits
_ROWS_AT_ONCE = 32


def token_logprobs(
    logits_BV: torch.Tensor, tokens: Sequence[int], wanted: Sequence[int | None]
) -> list[TokenLogprob | None]:
    """Give each row's token its log-probability, and so many of the likeliest ones as wanted.

    Natural logarithms of the softmax of these logits, in float32; -inf where there is no chance.
    None for a row that wants none; no list at all where no row wants any.
    """
    rows = [row for row, count in enumerate(wanted) if count is not None]
    if not rows:
        return []
    found: list[TokenLogprob | None] = [None] * len(tokens)
    for first in range(0, len(rows), _ROWS_AT_ONCE):
        some = rows[first : first + _ROWS_AT_ONCE]
        logits_LV = logits_BV[torch.tensor(some, device=logits_BV.device)].float()
        counts = [wanted[row] or 0 for row in some]
        for row, logprob in zip(
            some, _some(logits_LV, [tokens[row] for row in some], counts), strict=True
        ):
            found[row] = logprob
    return found


def _some(
    logits_LV: torch.Tensor, tokens: Sequence[int], counts: Sequence[int]
) -> list[TokenLogprob]:
    chosen_L1 = torch.tensor(tokens, device=logits_LV.device).unsqueeze(1)
    best_LK = _likeliest(logits_LV, min(max(counts), logits_LV.shape[1]))
    logprobs_LV = logits_LV.log_softmax(dim=-1)
    chosen = logprobs_LV.gather(1, chosen_L1).squeeze(1).tolist()
    best = zip(best_LK.tolist(), logprobs_LV.gather(1, best_LK).tolist(), strict=True)
    return [
        TokenLogprob(token, logprob, tuple(zip(ids[:count], values[:count], strict=True)))
        for token, logprob, (ids, values), count in zip(tokens, chosen, best, counts, strict=True)
    ]


def _likeliest(logits_LV: torch.Tensor, count: int) -> torch.Tensor:
    """The ids of the largest logits, best first; of equal ones, the lowest id first.

    `topk` of the logits themselves leaves open which of equal ones it takes, and in bfloat16
    many are equal. So each logit and its id become one whole number.
    """
    # adding 0 makes 0 of -0
    bits_LV = (logits_LV + 0.0).view(torch.int32).long()
    # the bits of a float below 0 grow as it falls
    order_LV = torch.where(bits_LV < 0, bits_LV ^ 0x7FFFFFFF, bits_LV)
    ids_V = torch.arange(logits_LV.shape[1], device=logits_LV.device)
    keys_LK = ((order_LV << 32) - ids_V).topk(count, dim=-1).values
    return -keys_LK & 0xFFFFFFFF
