"""Learn what each attention call of a model stores and sees. Knows nothing of how to attend.

One short pass is recorded under a name of its own, whose mask function describes masks instead
of building them: several models say only in their mask that a layer sees a window.

Shapes: T tokens of the packed row, H query heads, K kv heads, D width of a query or key head,
W width of a value head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from jobrunner.engine.attention.hook import UnservedError, read_options
from jobrunner.engine.kv import EVERYTHING, AttentionCall, Reach

# the second has no mask function: on the meta device masks cannot be made, nor looked at
_NAME, _MASKLESS_NAME = "cbjob_probe", "cbjob_probe_maskless"

_ATTRIBUTE = "cbjob_recorder"
_TOKENS = 3

MaskFunction = Callable[[Any, Any, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Description:
    """Of a mask; `reach` is None for a pattern that we do not have, which may never be used."""

    reach: Reach | None


def record_calls(
    model: torch.nn.Module, device: torch.device, max_model_len: int
) -> list[AttentionCall]:
    """Return the attention calls of one pass, in order; the model is left under the probe's name.

    On the meta device windows are those that the arguments of a call name. Raises UnservedError
    where the model does not take a registered attention function, or asks one for what we do
    not have; whatever else the model raises passes.
    """
    calls: list[AttentionCall] = []
    name = _MASKLESS_NAME if device.type == "meta" else _NAME
    ALL_ATTENTION_FUNCTIONS.register(name, _record)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_NAME, partial(_describe, max_model_len))
    for module in model.modules():
        setattr(module, _ATTRIBUTE, calls)
    model.set_attn_implementation(name)
    try:
        if model.config._attn_implementation != name:
            raise UnservedError(
                f"it stays with its `{model.config._attn_implementation}` attention"
            )
        positions_1T = torch.arange(_TOKENS, device=device).unsqueeze(0)
        with torch.inference_mode():
            model(
                input_ids=positions_1T,
                position_ids=positions_1T,
                use_cache=False,
                logits_to_keep=torch.tensor([_TOKENS - 1], device=device),
            )
    finally:
        for module in model.modules():
            delattr(module, _ATTRIBUTE)
    return calls


def reach_of(
    mask_function: MaskFunction, length: int, device: torch.device | str = "cpu"
) -> Reach | None:
    """Return which pattern a mask function of transformers follows over `length` positions.

    None for one that is neither causal, nor a window, nor chunks.
    """
    position_S = torch.arange(length, device=device)

    def row(own: int) -> torch.Tensor:
        return _masked(mask_function, position_S[own : own + 1], position_S)[0]

    # how many tokens see the first one is the size of a window or of a chunk
    size = int(_masked(mask_function, position_S, position_S[:1]).sum())
    reach = EVERYTHING
    if 0 < size < length:
        # the first token that does not: a window has moved on by one, a new chunk has begun
        reach = Reach(window=size) if bool(row(size)[1]) else Reach(chunk=size)
    looked_at = {0, 1, size - 1, size, size + 1, 2 * size, length // 2, length - 1}
    for own in sorted(looked_at & set(range(length))):
        expected_S = (position_S >= reach.first_seen(own)) & (position_S <= own)
        if not torch.equal(row(own), expected_S):
            return None
    return reach


def _masked(
    mask_function: MaskFunction, own_T: torch.Tensor, positions_S: torch.Tensor
) -> torch.Tensor:
    zero = own_T.new_zeros(1, 1, 1, 1)
    seen = mask_function(zero, zero, own_T.view(1, 1, -1, 1), positions_S.view(1, 1, 1, -1))
    return seen.expand(1, 1, len(own_T), len(positions_S))[0, 0]


def _describe(
    length: int, *, mask_function: MaskFunction, device: torch.device | str, **others: Any
) -> _Description:
    """Stand where transformers expects a function that builds a mask."""
    return _Description(reach_of(mask_function, length, device))


def _record(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: _Description | torch.Tensor | None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    if isinstance(attention_mask, torch.Tensor):
        raise UnservedError("the model brings an attention mask of its own")
    read_options(query, arguments)
    # where a model attends by itself its mask is what counts; the argument is for kernels
    reach: Reach | None = Reach(arguments.get("sliding_window"))
    if attention_mask is not None:
        reach = attention_mask.reach
    if reach is None:
        raise UnservedError("its mask is neither causal nor a window nor chunks")
    calls: list[AttentionCall] = getattr(module, _ATTRIBUTE)
    calls.append(AttentionCall(key.shape[1], key.shape[-1], value.shape[-1], reach))
    return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None
