"""Attention one token at a time, in float64: slow, and plain to see. Knows no pool and no pass.

Shapes: T tokens of one sequence, H query heads, K kv heads, D width of a query or key head,
W width of a value head.
"""

from __future__ import annotations

import torch


def plain_attention(
    q_HTD: torch.Tensor, k_KTD: torch.Tensor, v_KTW: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return what each token attends to, itself and all before it, `[T, H, W]`."""
    heads, tokens, _ = q_HTD.shape
    shared_by = heads // k_KTD.shape[0]
    q_HTD = q_HTD.double()
    k_HTD = k_KTD.double().repeat_interleave(shared_by, dim=0)
    v_HTW = v_KTW.double().repeat_interleave(shared_by, dim=0)
    out_THW = torch.empty(tokens, heads, v_HTW.shape[-1], dtype=torch.float64, device=q_HTD.device)
    for token in range(tokens):
        seen = slice(0, token + 1)
        scores_HS = torch.einsum("hd,hsd->hs", q_HTD[:, token], k_HTD[:, seen]) * scale
        out_THW[token] = torch.einsum("hs,hsw->hw", scores_HS.softmax(dim=-1), v_HTW[:, seen])
    return out_THW
