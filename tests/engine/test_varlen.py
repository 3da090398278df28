"""torch's kernel for prompts by its signatures of 2.11 and of 2.12 to 2.14, and by no other."""

from __future__ import annotations

import inspect
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import varlen as torch_module

from jobrunner.engine.attention.hook import AttentionOptions, Piece
from jobrunner.engine.attention.varlen_prefill import VarlenPrefill, adapted
from jobrunner.engine.block_pool import BlockPool
from jobrunner.engine.kv import EVERYTHING, AttentionCall, Reach
from tests.engine.test_transformers import generate, greedy, random_prompts, serve

CPU = torch.device("cpu")
Calls = list[dict[str, Any]]


def of_2_11(calls: Calls) -> Any:
    """As torch 2.11 has it: no block table, no lengths on the device, no `enable_gqa`."""

    def varlen_attn(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seq_q: torch.Tensor,
        cu_seq_k: torch.Tensor,
        max_q: int,
        max_k: int,
        *,
        return_aux: Any = None,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
    ) -> torch.Tensor:
        calls.append(locals())
        return query.new_zeros(query.shape)

    return varlen_attn


def of_2_12(calls: Calls) -> Any:
    """As torch 2.12 to 2.14 have it."""

    def varlen_attn(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seq_q: torch.Tensor,
        cu_seq_k: torch.Tensor | None,
        max_q: int,
        max_k: int,
        *,
        return_aux: Any = None,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        enable_gqa: bool = False,
        seqused_k: torch.Tensor | None = None,
        block_table: torch.Tensor | None = None,
        num_splits: int | None = None,
    ) -> torch.Tensor:
        calls.append(locals())
        return query.new_zeros(query.shape)

    return varlen_attn


def unknown(query: torch.Tensor, keys_and_values: torch.Tensor, lengths: torch.Tensor) -> None:
    raise AssertionError("a function that nobody knows was called")


def needs_more(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, layout, scale, window_size):
    raise AssertionError("a function that nobody knows was called")


def no_window(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None):
    raise AssertionError("a function that nobody knows was called")


def attend(function: Any, pieces: list[Piece], heads: int, kv_heads: int, reach: Reach) -> None:
    pool = BlockPool([AttentionCall(kv_heads, 8, 8, reach)], 16, 4, torch.float16, CPU)
    varlen, reason = adapted(function)
    assert reason is None
    prefill = VarlenPrefill(pool, CPU, varlen)
    prefill.begin(pieces)
    options = AttentionOptions(scale=0.25)
    assert prefill.unserved(0, options) is None
    count = sum(piece.stop - piece.start for piece in pieces)
    kv = torch.zeros(kv_heads, count, 8, dtype=torch.float16)
    q = torch.zeros(heads, count, 8, dtype=torch.float16)
    assert prefill.attend(0, q, kv, kv, options).shape == (count, heads, 8)


@pytest.mark.parametrize("version", [of_2_11, of_2_12])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2)])
def test_prompts_from_their_beginning_attend_to_their_own_keys(version: Any, heads, kv_heads):
    calls: Calls = []
    attend(version(calls), [Piece(0, 5, [0, 1]), Piece(0, 3, [2])], heads, kv_heads, EVERYTHING)
    [call] = calls
    assert call["query"].shape == (8, heads, 8)
    assert call["key"].shape == call["value"].shape == (8, kv_heads, 8)
    assert call["cu_seq_q"].tolist() == call["cu_seq_k"].tolist() == [0, 5, 8]
    assert call["cu_seq_q"].dtype == call["cu_seq_k"].dtype == torch.int32
    assert (call["max_q"], call["max_k"]) == (5, 5)
    assert (type(call["max_q"]), type(call["max_k"])) == (int, int)
    assert call["scale"] == 0.25
    # causal
    assert call["window_size"] == (-1, 0)
    assert call["return_aux"] is None
    if version is of_2_12:
        assert call["enable_gqa"] == (heads != kv_heads)
        assert call["block_table"] is call["seqused_k"] is call["num_splits"] is None


@pytest.mark.parametrize("version", [of_2_11, of_2_12])
def test_a_continued_prompt_attends_to_all_its_keys_gathered(version: Any):
    calls: Calls = []
    pieces = [Piece(4, 9, [3, 5, 7]), Piece(0, 2, [1])]
    attend(version(calls), pieces, 4, 2, Reach(window=6))
    [call] = calls
    assert call["key"].shape == (11, 2, 8)
    assert call["cu_seq_q"].tolist() == [0, 5, 7]
    assert call["cu_seq_k"].tolist() == [0, 9, 11]
    assert (call["max_q"], call["max_k"]) == (5, 9)
    # the own token counts in ours, not in torch's
    assert call["window_size"] == (5, 0)


def test_the_installed_torch_is_one_of_those_known():
    varlen, reason = adapted(torch_module.varlen_attn)
    assert varlen is not None, reason
    ours, theirs = (
        set(inspect.signature(each).parameters) for each in (of_2_12([]), torch_module.varlen_attn)
    )
    assert theirs <= ours


@pytest.mark.parametrize("function", [unknown, needs_more, no_window])
def test_an_unknown_signature_is_refused_in_words(function: Any):
    varlen, reason = adapted(function)
    assert varlen is None
    names = ", ".join(inspect.signature(function).parameters)
    assert reason == f"torch {torch.__version__} has an unknown varlen_attn({names})"


def test_with_an_unknown_signature_prompts_take_another_way_and_the_log_says_so_once(
    llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(torch_module, "varlen_attn", unknown)
    prompts = random_prompts(4)
    with caplog.at_level(logging.INFO, "cbjob"):
        rows = [greedy(*row) for row in enumerate(prompts)]
        _, done = serve(llama, rows, attention="reference", chunk_size=7)
    assert [done[index].tokens for index in range(4)] == generate(llama, prompts)
    said = [message for message in caplog.messages if "plain torch" in message]
    words = (
        "prompts are attended to by plain torch, more slowly:"
        f" torch {torch.__version__} has an unknown varlen_attn(query, keys_and_values, lengths)"
    )
    # for the proof at the start, and for the job
    assert said == [words] * len(said)
    assert 1 <= len(said) <= 2
