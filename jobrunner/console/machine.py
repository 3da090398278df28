"""Bound from below the time that a step needs on this machine. Knows no model and no clock."""

from __future__ import annotations

from dataclasses import dataclass

from jobrunner.records import Step


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """What one token of the model needs, and what the machine was measured to give.

    `flops_per_token` is 2 · the parameters that every token passes, `flops_per_output_token`
    2 · those that only a sampled token does (the output projection). `weight_bytes` are what
    a step reads of the weights, `kv_bytes_per_token` what it reads of one token's KV.
    `attention_flops` are those of one token that attends to one token, over all layers.
    """

    flops_per_token: float
    weight_bytes: float
    kv_bytes_per_token: float
    gemm_flops_per_s: float
    read_bytes_per_s: float
    flops_per_output_token: float = 0.0
    attention_flops: float = 0.0

    def least_s(self, step: Step) -> float:
        """Seconds below which the step's needed work cannot be done: the larger of
        FLOPs / rate and bytes / rate.

        Padded and recomputed tokens are not needed. Attention's own FLOPs are left out, so the
        bound stays below the truth. Weights that stay in a cache between steps are read faster
        than the measured rate: there, and only there, a step can beat the bound.
        """
        tokens = step.tokens_computed - step.tokens_padded - step.tokens_recomputed
        flops = self.flops_per_token * tokens + self.flops_per_output_token * step.output_tokens
        read_bytes = self.weight_bytes + self.kv_bytes_per_token * step.context_tokens
        return max(flops / self.gemm_flops_per_s, read_bytes / self.read_bytes_per_s)

    def most_prefill_tokens_per_s(self, tokens: int) -> float:
        """The rate that prompts cannot be read faster than, in steps of so many tokens T:
        T / max(T · flops_per_token / gemm rate, weight_bytes / read rate).
        """
        return tokens / self.least_s(Step(tokens_computed=tokens))

    def most_decode_tokens_per_s(self, batch_size: int, context: int) -> float:
        """The rate that output tokens cannot be made faster than, with B sequences of so many
        tokens S each: B / max(B · (flops_per_token + flops_per_output_token) / gemm rate,
        (weight_bytes + B · S · kv_bytes_per_token) / read rate).
        """
        return batch_size / self.least_s(
            Step(
                tokens_computed=batch_size,
                output_tokens=batch_size,
                context_tokens=batch_size * context,
            )
        )
