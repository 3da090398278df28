"""Run a plan through a transformers model. Knows nothing of queues, blocks' owners or text.

Shapes: T tokens of the packed row, B rows of logits, V vocabulary.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from jobrunner.engine.attention.hook import Attention, Piece
from jobrunner.engine.logprobs import token_logprobs
from jobrunner.engine.sampler import sample
from jobrunner.engine.scheduler import Chunk, Drawn, Plan
from jobrunner.engine.sequence import Sequence as Running
from jobrunner.errors import InfrastructureError


@dataclass(frozen=True, slots=True)
class Packed:
    """One row of tokens for one forward pass, and the rows of which logits are wanted."""

    tokens: array[int]
    positions: array[int]
    pieces: Sequence[Piece]
    logit_rows: Sequence[int]


def pack(chunks: Sequence[Chunk]) -> Packed:
    """Lay chunks into one row: single tokens first, by context length, then the longer ones.

    `logit_rows` are in the order of the given chunks, one for each that samples.
    """

    def single_first(index: int) -> tuple[bool, int]:
        chunk = chunks[index]
        return chunk.stop - chunk.start > 1, chunk.stop

    tokens, positions = array("q"), array("q")
    pieces: list[Piece] = []
    last_row = [0] * len(chunks)
    for index in sorted(range(len(chunks)), key=single_first):
        chunk = chunks[index]
        tokens.extend(chunk.sequence.tokens[chunk.start : chunk.stop])
        positions.extend(range(chunk.start, chunk.stop))
        pieces.append(Piece(chunk.start, chunk.stop, chunk.sequence.blocks))
        last_row[index] = len(tokens) - 1
    logit_rows = [row for row, chunk in zip(last_row, chunks, strict=True) if chunk.samples]
    return Packed(tokens, positions, pieces, logit_rows)


class TransformersRunner:
    """Runs plans on a model to which `attention` is attached."""

    def __init__(self, model: torch.nn.Module, attention: Attention, device: torch.device) -> None:
        self._model = model
        self._attention = attention
        self._device = device

    def run(self, plan: Plan) -> Drawn:
        """Return one sampled token per sampling chunk, in the order of the plan."""
        sampling = [chunk.sequence for chunk in plan.chunks if chunk.samples]
        draws = [sequence.draw for sequence in sampling]
        wanted = [draw.sampling.logprobs if draw else None for draw in draws]
        # a device tells of its failures when it is next waited for, here or there
        with _device_failures():
            logits_BV = self.logits(pack(plan.chunks))[: len(sampling)]
            _check_finite(logits_BV, sampling)
            tokens = sample(logits_BV, draws)
            return Drawn(tokens, token_logprobs(logits_BV, tokens, wanted))

    def logits(self, packed: Packed) -> torch.Tensor:
        """Compute a packed row; return the logits of its `logit_rows` in float32, `[B, V]`.

        Where none are wanted there is one row all the same, of the first token.
        """
        self._attention.begin(packed.pieces)
        rows = torch.tensor(packed.logit_rows or [0], device=self._device)
        with torch.inference_mode():
            logits_1BV = self._model(
                input_ids=self._row(packed.tokens),
                position_ids=self._row(packed.positions),
                use_cache=False,
                logits_to_keep=rows,
            ).logits
            return logits_1BV[0].float()

    def _row(self, numbers: array[int]) -> torch.Tensor:
        return torch.frombuffer(numbers, dtype=torch.int64).to(self._device).unsqueeze(0)


@contextmanager
def _device_failures() -> Iterator[None]:
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError) as error:
        raise InfrastructureError(
            f"the device failed: {error}",
            hint="run again; out of memory: lower batching.kv_memory or token_budget",
        ) from error


def _check_finite(logits_BV: torch.Tensor, sampling: Sequence[Running]) -> None:
    """Stop before a token is drawn from nothing: what is not finite spreads through the KV pool."""
    if not len(sampling) or bool(logits_BV.amax(dim=-1).isfinite().all()):
        return
    broken = (~logits_BV.amax(dim=-1).isfinite()).nonzero().flatten().tolist()
    rows = [sampling[place].request.id for place in broken]
    raise InfrastructureError(
        f"the model gives logits that are not finite for {rows[0]} and {len(rows) - 1} more",
        hint='a wider `model.dtype` may help: "bfloat16" or "float32"; else the weights are broken',
    )
