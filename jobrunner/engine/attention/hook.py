"""Put an attention backend under a transformers model. Knows nothing of scheduling.

Shapes: T tokens of a packed row, H query heads, K kv heads, D width of a query or key head,
W width of a value head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# a name without a mask function of its own makes transformers build no mask at all
NAME = "cbjob_paged"

_ATTRIBUTE = "cbjob_attention"
_IRRELEVANT = frozenset({"dropout", "position_ids", "use_cache", "is_causal"})


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens `start` up to `stop` of one sequence and the blocks that hold tokens 0 to `stop`."""

    start: int
    stop: int
    blocks: Sequence[int]


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What a model asks of one attention call.

    `window` is how many tokens back from itself, itself included, a token sees; `sinks`, `[H]`, is
    one more logit per head that takes weight and gives nothing.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


class Attention(Protocol):
    """An attention backend: told once per pass what the packed row holds, then called."""

    def begin(self, pieces: Sequence[Piece]) -> None:
        """Prepare for one forward pass over these pieces, packed in this order.

        Pieces of one token come first, those with the shortest context in front.
        """

    def attend(
        self,
        q_HTD: torch.Tensor,
        k_KTD: torch.Tensor,
        v_KTW: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Store K and V, and return what each token attends to, `[T, H, W]`."""


def attach(model: torch.nn.Module, attention: Attention) -> None:
    """Let every attention module of the model call this backend.

    The caller checks that the model took it: `model.config._attn_implementation == NAME`.
    """
    ALL_ATTENTION_FUNCTIONS.register(NAME, _dispatch)
    for module in model.modules():
        setattr(module, _ATTRIBUTE, attention)
    model.set_attn_implementation(NAME)


def _dispatch(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    if attention_mask is not None:
        raise NotImplementedError("the model brings an attention mask of its own")
    _refuse_unknown(others)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    options = AttentionOptions(scale, sliding_window, softcap, s_aux)
    attention: Attention = getattr(module, _ATTRIBUTE)
    return attention.attend(query[0], key[0], value[0], options).unsqueeze(0), None


def _refuse_unknown(others: dict[str, Any]) -> None:
    if others.get("is_causal") is False:
        raise NotImplementedError("the model asks for attention that is not causal")
    for name, value in others.items():
        if name in _IRRELEVANT or name.startswith("output_") or value is None:
            continue
        raise NotImplementedError(f"the model passes `{name}` to its attention")
