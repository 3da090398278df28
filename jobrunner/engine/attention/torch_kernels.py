"""What the kernels do, in plain torch: the reference they are tested against, and their stand-in.

Shapes: T tokens of a pass, B sequences that decode, H query heads, K kv heads, G query heads of
one kv head, N blocks, P positions of a block, S tokens of the longest context, D width of a query
or key head, W width of a value head.
"""

from __future__ import annotations

import torch

from jobrunner.engine.attention.hook import AttentionOptions
from jobrunner.engine.kv import Reach


def decode(
    out_BHW: torch.Tensor,
    q_HBD: torch.Tensor,
    keys_KNPD: torch.Tensor,
    values_KNPW: torch.Tensor,
    table: torch.Tensor,
    rows_B: torch.Tensor,
    lengths_B: torch.Tensor,
    options: AttentionOptions,
    reach: Reach,
    splits: int,
) -> None:
    """Fill in what one token of each sequence attends to; like the kernel, look only at tensors.

    `splits` makes no difference here.
    """
    kv_heads, _, block_size, _ = keys_KNPD.shape
    position_S = torch.arange(table.shape[1] * block_size, device=table.device)
    hidden_BS = position_S >= lengths_B.unsqueeze(1)
    hidden_BS |= position_S < reach.first_seen(lengths_B.unsqueeze(1) - 1)
    block_BS = table[rows_B].long()[:, position_S // block_size]
    # what stands behind the blocks of a sequence in its row means nothing
    block_BS = block_BS.masked_fill(position_S >= lengths_B.unsqueeze(1), 0)
    place_BS = (position_S % block_size).expand_as(block_BS)
    k_KBSD = keys_KNPD[:, block_BS, place_BS].float()
    v_KBSW = values_KNPW[:, block_BS, place_BS].float()
    q_KBGD = q_HBD.unflatten(0, (kv_heads, -1)).transpose(1, 2).float()
    scores_KBGS = torch.matmul(q_KBGD, k_KBSD.transpose(2, 3)) * options.scale
    if options.softcap is not None:
        scores_KBGS = options.softcap * torch.tanh(scores_KBGS / options.softcap)
    scores_KBGS = scores_KBGS.masked_fill(hidden_BS.unsqueeze(1), float("-inf"))
    if options.sinks is not None:
        sinks_K1G1 = options.sinks.float().view(kv_heads, 1, -1, 1)
        sinks_KBG1 = sinks_K1G1.expand(*scores_KBGS.shape[:-1], 1)
        weights_KBGS = torch.cat([scores_KBGS, sinks_KBG1], -1).softmax(-1)[..., :-1]
    else:
        weights_KBGS = scores_KBGS.softmax(-1)
    # what is hidden may hold anything, and 0 times infinity is no number
    v_KBSW = v_KBSW.masked_fill(hidden_BS.unsqueeze(-1), 0)
    out_KBGW = torch.matmul(weights_KBGS, v_KBSW)
    out_BHW.copy_(out_KBGW.permute(1, 0, 2, 3).flatten(1, 2))


def write(
    keys_KNPD: torch.Tensor,
    values_KNPW: torch.Tensor,
    k_KTD: torch.Tensor,
    v_KTW: torch.Tensor,
    slots_T: torch.Tensor,
) -> None:
    """Store K and V of T tokens in slots, a slot being `block * block_size + position`."""
    block_size = keys_KNPD.shape[2]
    block_T, position_T = slots_T // block_size, slots_T % block_size
    keys_KNPD[:, block_T, position_T] = k_KTD
    values_KNPW[:, block_T, position_T] = v_KTW
