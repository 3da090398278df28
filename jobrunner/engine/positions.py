"""Fix what would follow a token's place in the packed row instead of that in its sequence."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

log = logging.getLogger("cbjob")

# transformers picks their frequencies by the longest position of a whole pass
_ROW_DEPENDENT = frozenset({"dynamic", "longrope"})


def untuned_length(config: PretrainedConfig) -> int | None:
    """The longest row that a model does not rescale by position, None where none is rescaled.

    Llama 4 scales queries from `floor_scale` tokens on, counted along the packed row.
    """
    if not getattr(config, "attn_temperature_tuning", False):
        return None
    return int(config.floor_scale) - 1


def freeze_positions(model: torch.nn.Module, max_model_len: int) -> None:
    """Make what a model computes of a token independent of the other rows of its batch.

    Rotary frequencies that grow with the text become those of a row of `max_model_len` tokens;
    `max_model_len` is at most what `untuned_length` says.
    """
    frozen = set()
    for module in model.modules():
        if getattr(module, "attn_temperature_tuning", False):
            module.attn_temperature_tuning = False
        for rope_type, layer_type in _row_dependent(module):
            _freeze_rotary(module, rope_type, layer_type, max_model_len)
            frozen.add(rope_type)
    for rope_type in sorted(frozen):
        log.info("rope scaling %s: as for %s tokens, in every row", rope_type, f"{max_model_len:,}")


def _row_dependent(module: torch.nn.Module) -> Iterator[tuple[str, str | None]]:
    """The rope types to freeze in a rotary module, with the layer types that they are for."""
    rope_type = getattr(module, "rope_type", None)
    if isinstance(rope_type, str) and rope_type in _ROW_DEPENDENT:
        yield rope_type, None
    elif isinstance(rope_type, dict):
        for layer_type, name in list(rope_type.items()):
            if name in _ROW_DEPENDENT:
                yield name, layer_type


def _freeze_rotary(
    module: torch.nn.Module, rope_type: str, layer_type: str | None, max_model_len: int
) -> None:
    several = {} if layer_type is None else {"layer_type": layer_type}
    prefix = "" if layer_type is None else f"{layer_type}_"
    frequencies = getattr(module, f"{prefix}inv_freq")
    computed, scaling = ROPE_INIT_FUNCTIONS[rope_type](
        module.config, frequencies.device, seq_len=max_model_len, **several
    )
    frequencies.copy_(computed)
    setattr(module, f"{prefix}attention_scaling", scaling)
    # from now on nothing is updated
    if layer_type is None:
        module.rope_type = "default"
    else:
        module.rope_type[layer_type] = "default"
