"""Put an attention backend under a transformers model. Knows nothing of scheduling.

Shapes: T tokens of a packed row, H query heads, K kv heads, D width of a query or key head,
W width of a value head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

Numbers = np.ndarray

# a name without a mask function of its own makes transformers build no mask at all
NAME = "cbjob_paged"

_ATTRIBUTE = "cbjob_attention"
_OPTIONS = frozenset({"scaling", "softcap", "s_aux"})
# the probe has looked at windows before
_IRRELEVANT = frozenset({"dropout", "position_ids", "use_cache", "is_causal", "sliding_window"})
_KNOWN = _OPTIONS | _IRRELEVANT


class UnservedError(Exception):
    """A model asks its attention for something that no backend of ours does."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens `start` up to `stop` of one sequence and the blocks that hold tokens 0 to `stop`."""

    start: int
    stop: int
    blocks: Sequence[int]


@dataclass(frozen=True, slots=True, eq=False)
class Singles:
    """One token each of N sequences, the last of so many tokens as `lengths`, `[N]`, says.

    Row `rows`, `[N]`, of `table`, `[rows, blocks]`, lists the blocks that hold them, in order;
    what stands behind those in a row means nothing.
    """

    table: Numbers = field(default_factory=lambda: np.zeros((0, 1), np.int32))
    rows: Numbers = field(default_factory=lambda: np.zeros(0, np.int64))
    lengths: Numbers = field(default_factory=lambda: np.zeros(0, np.int64))

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """How a model wants the scores of one attention call; what a token sees is the pool's to know.

    `sinks`, `[H]`, is one more logit per head that takes weight and gives nothing.
    """

    scale: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None


class Attention(Protocol):
    """An attention backend: told once per pass what the packed row holds, then called."""

    def begin(self, singles: Singles, pieces: Sequence[Piece]) -> None:
        """Prepare for one forward pass over single tokens and then pieces, packed in this order.

        Of the single tokens those with the shortest context come first.
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


def read_options(query_1HTD: torch.Tensor, arguments: dict[str, Any]) -> AttentionOptions:
    """Return what the arguments of an attention call ask for.

    Raises UnservedError for an argument that we do not know: it could mean anything.
    """
    if arguments.get("is_causal") is False:
        raise UnservedError("the model asks for attention that is not causal")
    for name, value in arguments.items():
        if name in _KNOWN or name.startswith("output_") or value is None:
            continue
        raise UnservedError(f"the model passes `{name}` to its attention")
    scale: float | None = arguments.get("scaling")
    return AttentionOptions(
        scale=query_1HTD.shape[-1] ** -0.5 if scale is None else scale,
        softcap=arguments.get("softcap"),
        sinks=arguments.get("s_aux"),
    )


def _dispatch(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    if attention_mask is not None:
        raise UnservedError("the model brings an attention mask of its own")
    options = read_options(query, arguments)
    attention: Attention = getattr(module, _ATTRIBUTE)
    return attention.attend(query[0], key[0], value[0], options).unsqueeze(0), None
