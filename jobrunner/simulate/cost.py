"""What a step costs in virtual time. Knows nothing of schedulers, clocks or files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step: linear in what it computes, and a part that every step has.

    `context_token_s` is for each token that a sequence of the step already has in KV memory,
    `attended_token_s` for each that a prompt token attends to (a prompt of L has L (L + 1) / 2),
    `swapped_block_s` for each block that goes to host memory or comes back, `prefill_step_s` for
    a step that has prompts at all: it runs without what is prepared for decodes alone.
    """

    step_s: float = 0.0
    prefill_token_s: float = 0.0
    decode_s: float = 0.0
    context_token_s: float = 0.0
    swapped_block_s: float = 0.0
    prefill_step_s: float = 0.0
    attended_token_s: float = 0.0

    def seconds(
        self, prefill_tokens: int, decodes: int, context_tokens: int, attended_tokens: int = 0
    ) -> float:
        """Seconds of one step with so many tokens; a padded place of a batch is a decode."""
        return (
            self.step_s
            + self.prefill_step_s * (prefill_tokens > 0)
            + self.prefill_token_s * prefill_tokens
            + self.decode_s * decodes
            + self.context_token_s * context_tokens
            + self.attended_token_s * attended_tokens
        )


@dataclass(frozen=True, slots=True)
class Profile:
    """A machine with a model: what a step costs, how much fits, and what that assumes."""

    name: str
    assumes: str
    cost: StepCost
    kv_bytes_per_token: int
    kv_memory: int
    max_batch_size: int
    token_budget: int


_FLOPS_PER_S = 788e12
_BYTES_PER_S = 4.3e12
_WEIGHT_BYTES = 16e9
_PARAMETERS = 8e9
_KV_BYTES = 131_072  # 2 (K and V) · 32 layers · 8 KV heads · 128 wide · 2 bytes
_HOST_LINK_BYTES_PER_S = 50e9
_BLOCK_TOKENS = 16

_H200_8B = Profile(
    name="h200-8b",
    assumes=(
        "a dense model of 8B parameters in bfloat16 (16 GB of weights, KV of 131,072 bytes a token,"
        " as Llama 3.1 8B has it) on one H200-class GPU at the rates measured there: 788 TFLOP/s"
        " in bf16 GEMMs, 4.3 TB/s read. A step reads all weights once and the KV of its context"
        " once, each token costs 2 FLOPs a parameter, and nothing overlaps: reading and computing"
        " add up. The attention's own FLOPs are left out (3% at 2,048 tokens). Host time is hidden"
        " behind the step. 114 GB are left for KV. A block of 16 tokens goes to host memory or"
        " back at 50 GB/s"
    ),
    cost=StepCost(
        step_s=_WEIGHT_BYTES / _BYTES_PER_S,
        prefill_token_s=2 * _PARAMETERS / _FLOPS_PER_S,
        decode_s=2 * _PARAMETERS / _FLOPS_PER_S,
        context_token_s=_KV_BYTES / _BYTES_PER_S,
        swapped_block_s=_KV_BYTES * _BLOCK_TOKENS / _HOST_LINK_BYTES_PER_S,
    ),
    kv_bytes_per_token=_KV_BYTES,
    kv_memory=114_000_000_000,
    max_batch_size=256,
    token_budget=8192,
)

PROFILES: Mapping[str, Profile] = {_H200_8B.name: _H200_8B}
