"""Log-probabilities of drawn tokens and of the likeliest. Knows nothing of how they were drawn.

Shapes: B rows, V vocabulary, L rows whose log-probabilities are wanted, K likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from jobrunner.engine.devices import to_device
from jobrunner.records import TokenLogprob

# rows looked at together: bounds the copies of the logits
_ROWS_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class Looked:
    """What was found for some rows, still on the device, and how many of the K each row wants.

    `tokens` and what was `chosen` with them are `[L]`; `best` ids and their `logprobs` `[L, K]`.
    """

    rows: Sequence[int]
    counts: Sequence[int]
    tokens: torch.Tensor
    chosen: torch.Tensor
    best: torch.Tensor
    logprobs: torch.Tensor

    def to_host(self) -> Looked:
        """Begin to copy it to the host, which must wait for the device before it reads."""
        return Looked(
            self.rows,
            self.counts,
            self.tokens.to("cpu", non_blocking=True),
            self.chosen.to("cpu", non_blocking=True),
            self.best.to("cpu", non_blocking=True),
            self.logprobs.to("cpu", non_blocking=True),
        )


def look(
    logits_BV: torch.Tensor, tokens_B: torch.Tensor, wanted: Sequence[int | None]
) -> list[Looked]:
    """Find the log-probability of each row's token, and so many of the likeliest as it wants.

    Natural logarithms of the softmax of these logits, in float32; -inf where there is no chance.
    None wants none. Does not wait for the device.
    """
    rows = [row for row, count in enumerate(wanted) if count is not None]
    found = []
    for first in range(0, len(rows), _ROWS_AT_ONCE):
        some = rows[first : first + _ROWS_AT_ONCE]
        rows_L = to_device(np.array(some), logits_BV.device)
        counts = [wanted[row] or 0 for row in some]
        found.append(_look(some, counts, logits_BV[rows_L].float(), tokens_B[rows_L]))
    return found


def read(looked: Sequence[Looked], row_count: int) -> list[TokenLogprob | None]:
    """Read what was found: one for each of so many rows, None for one that wants none.

    No list at all where no row wants any.
    """
    if not looked:
        return []
    found: list[TokenLogprob | None] = [None] * row_count
    for some in looked:
        best = zip(some.best.tolist(), some.logprobs.tolist(), strict=True)
        chosen = zip(some.tokens.tolist(), some.chosen.tolist(), strict=True)
        for row, count, (token, logprob), (ids, values) in zip(
            some.rows, some.counts, chosen, best, strict=True
        ):
            top = tuple(zip(ids[:count], values[:count], strict=True))
            found[row] = TokenLogprob(token, logprob, top)
    return found


def _look(
    rows: Sequence[int], counts: Sequence[int], logits_LV: torch.Tensor, tokens_L: torch.Tensor
) -> Looked:
    best_LK = _likeliest(logits_LV, min(max(counts), logits_LV.shape[1]))
    logprobs_LV = logits_LV.log_softmax(dim=-1)
    chosen_L = logprobs_LV.gather(1, tokens_L.unsqueeze(1)).squeeze(1)
    return Looked(rows, counts, tokens_L, chosen_L, best_LK, logprobs_LV.gather(1, best_LK))


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
