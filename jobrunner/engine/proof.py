"""Try a loaded model on our attention before any row depends on it. Knows nothing of rows.

Shapes: T tokens of the packed row, H query heads, K kv heads, D width of a query or key head,
W width of a value head, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from jobrunner.engine.attention.choice import Backend
from jobrunner.engine.attention.hook import Piece, Singles, UnservedError, attach
from jobrunner.engine.attention.probe import record_calls
from jobrunner.engine.kv import AttentionCall
from jobrunner.engine.lack import lacks_memory
from jobrunner.engine.runner import Packed, TransformersRunner
from jobrunner.engine.support import check_calls, check_reach, refusal
from jobrunner.errors import ModelError

# relative error of a row of logits that rounding explains; a wrong attention is off by its size
_TOLERANCE = {torch.float32: 0.01, torch.float16: 0.1, torch.bfloat16: 0.25}
_FAILURES = (RuntimeError, TypeError, ValueError, KeyError, IndexError, AttributeError)
_SEED = 20240229
_LONG, _SHORT = 13, 6

ChooseBackend = Callable[[torch.device, torch.dtype, Sequence[AttentionCall]], Backend]


class _Turn(NamedTuple):
    """Tokens `start` up to `stop` of test sequence 0 or 1."""

    sequence: int
    start: int
    stop: int


# first chunks, then a decode beside a chunk that goes on, then two decodes
_PASSES = (
    (_Turn(0, 0, 5), _Turn(1, 0, 4)),
    (_Turn(1, 4, 5), _Turn(0, 5, 12)),
    (_Turn(1, 5, _SHORT), _Turn(0, 12, _LONG)),
)


def leave(model: torch.nn.Module) -> None:
    """Change nothing."""


def prove(
    model: torch.nn.Module,
    choose_backend: ChooseBackend,
    block_size: int,
    max_model_len: int,
    improve: Callable[[torch.nn.Module], None] = leave,
) -> tuple[list[AttentionCall], Backend]:
    """Return the attention calls of one pass and who attends, shown to compute the same logits.

    The model must come with eager attention; it leaves with ours, and with what `improve` changes
    in place, which is under the same proof. Raises ModelError where it does not take our
    attention, attends elsewhere too, or computes something else with ours.
    """
    device, dtype = model.device, model.dtype
    sequences = _test_sequences(model.config.get_text_config().vocab_size)
    try:
        expected = [_eager_logits(model, tokens, device) for tokens in sequences]
        calls = record_calls(model, device, max_model_len)
        check_calls(model.config, calls)
        check_reach(model.config, calls, max_model_len)
        # first who attends: that also settles where what is compiled is kept
        backend = choose_backend(device, dtype, calls)
        improve(model)
        pool = backend.make_pool(calls, 2 * -(-_LONG // block_size), block_size, dtype, device)
        attention = backend.make_attention(pool, device)
        attach(model, attention)
        actual = _paged_logits(TransformersRunner(model, attention, device), sequences, block_size)
    except (UnservedError, *_FAILURES) as error:
        if lacks_memory(error):
            raise
        raise refusal(model.config, f"with paged attention it fails: {error}") from error
    for expected_TV, actual_TV in zip(expected, actual, strict=True):
        _compare(model, expected_TV, actual_TV, _TOLERANCE[dtype])
    return calls, backend


def _test_sequences(vocabulary: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(_SEED)
    return [
        torch.randint(vocabulary, (length,), generator=generator).tolist()
        for length in (_LONG, _SHORT)
    ]


def _eager_logits(
    model: torch.nn.Module, tokens: Sequence[int], device: torch.device
) -> torch.Tensor:
    ids = torch.tensor([tokens], device=device)
    positions = torch.arange(len(tokens), device=device).unsqueeze(0)
    with torch.inference_mode():
        logits_1TV = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        return logits_1TV[0].float()


def _paged_logits(
    runner: TransformersRunner, sequences: Sequence[Sequence[int]], block_size: int
) -> list[torch.Tensor]:
    """Logits of every token of both sequences, computed side by side in chunks."""
    width = -(-_LONG // block_size)
    # neighbours in a sequence are not neighbours in memory
    tables = [list(range(0, 2 * width, 2)), list(range(1, 2 * width, 2))]
    rows: list[list[torch.Tensor]] = [[], []]
    for turns in _PASSES:
        tokens, positions = list[int](), list[int]()
        for turn in turns:
            tokens += sequences[turn.sequence][turn.start : turn.stop]
            positions += range(turn.start, turn.stop)
        single = [turn for turn in turns if turn.stop - turn.start == 1]
        packed = Packed(
            np.array(tokens),
            np.array(positions),
            Singles(
                np.array(tables, np.int32),
                np.array([turn.sequence for turn in single], np.int64),
                np.array([turn.stop for turn in single], np.int64),
            ),
            [Piece(turn.start, turn.stop, tables[turn.sequence]) for turn in turns[len(single) :]],
            np.arange(len(tokens)),
        )
        logits_TV = runner.logits(packed).float()
        lengths = [turn.stop - turn.start for turn in turns]
        for turn, part_TV in zip(turns, logits_TV.split(lengths), strict=True):
            rows[turn.sequence].append(part_TV)
    return [torch.cat(parts) for parts in rows]


def _compare(
    model: torch.nn.Module, expected_TV: torch.Tensor, actual_TV: torch.Tensor, tolerance: float
) -> None:
    kind = model.config.model_type
    if not bool(expected_TV.isfinite().all()):
        raise ModelError(
            f"model type `{kind}` gives logits that are not finite in {model.dtype}",
            hint='set model.dtype = "float32", or "bfloat16" instead of "float16"',
        )
    # a shift of all logits changes nothing, so it must not hide a difference
    spread_T = (expected_TV - expected_TV.mean(dim=-1, keepdim=True)).norm(dim=-1)
    error_T = (actual_TV - expected_TV).norm(dim=-1) / spread_T.clamp(min=1e-6)
    worst = float(error_T.max())
    if not worst <= tolerance:
        raise ModelError(
            f"model type `{kind}` computes other logits with paged attention than with its own: "
            f"relative difference {worst:.3g}, limit {tolerance}",
            hint="use another model; this one keeps state or masks that we do not know of",
        )
