"""Paged attention against plain attention over each whole context."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from jobrunner.engine.attention.choice import BY_BLOCK, PLAIN, REFERENCE, Backend
from jobrunner.engine.attention.hook import AttentionOptions, Piece, Singles, UnservedError, attach
from jobrunner.engine.attention.torch_paged import TorchPagedAttention, decode_groups
from jobrunner.engine.kv import EVERYTHING, AttentionCall, KvPool, Reach, bytes_per_token
from jobrunner.engine.runner import Packed, TransformersRunner
from tests.properties import examples

HEADS, KV_HEADS, KEY_WIDTH, VALUE_WIDTH = 4, 2, 8, 6
CALL = AttentionCall(KV_HEADS, KEY_WIDTH, VALUE_WIDTH)


@dataclass(frozen=True)
class Tokens:
    """q, k and v of a whole sequence, heads in front."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def random_tokens(length: int, generator: torch.Generator) -> Tokens:
    def heads(count: int, width: int) -> torch.Tensor:
        return torch.randn(count, length, width, generator=generator)

    return Tokens(heads(HEADS, KEY_WIDTH), heads(KV_HEADS, KEY_WIDTH), heads(KV_HEADS, VALUE_WIDTH))


def plain_attention(
    tokens: Tokens, options: AttentionOptions, reach: Reach = EVERYTHING
) -> torch.Tensor:
    """What each token attends to, one token at a time, `[length, heads, width]`."""
    out = torch.empty(tokens.q.shape[1], HEADS, VALUE_WIDTH)
    keys = tokens.k.repeat_interleave(HEADS // KV_HEADS, dim=0)
    values = tokens.v.repeat_interleave(HEADS // KV_HEADS, dim=0)
    rest = torch.zeros(HEADS, 1) if options.sinks is None else options.sinks.exp().view(HEADS, 1)
    for row in range(out.shape[0]):
        first = 0
        if reach.window is not None:
            first = max(0, row - reach.window + 1)
        if reach.chunk is not None:
            first = row - row % reach.chunk
        seen = slice(first, row + 1)
        scores = torch.einsum("hd,hsd->hs", tokens.q[:, row], keys[:, seen]) * options.scale
        if options.softcap is not None:
            scores = options.softcap * torch.tanh(scores / options.softcap)
        weights = scores.exp()
        shares = weights / (weights.sum(dim=1, keepdim=True) + rest)
        out[row] = torch.einsum("hs,hsw->hw", shares, values[:, seen])
    return out


def singles(tables: list[list[int]], turns: list[tuple[int, int]]) -> Singles:
    rows, lengths = zip(*turns, strict=True) if turns else ((), ())
    return Singles(
        np.array(tables, np.int32), np.array(rows, np.int64), np.array(lengths, np.int64)
    )


def paged_attention(
    sequences: list[Tokens],
    chunks: list[int],
    block_size: int,
    options: AttentionOptions,
    reach: Reach = EVERYTHING,
    backend: Backend = PLAIN,
) -> list[torch.Tensor]:
    """The same by a backend: every sequence goes on by its own chunk size each pass."""
    lengths = [tokens.q.shape[1] for tokens in sequences]
    width = -(-max(lengths) // block_size)
    call = replace(CALL, reach=reach)
    device = torch.device("cpu")
    pool = backend.make_pool([call], width * len(sequences), block_size, torch.float32, device)
    attention = backend.make_attention(pool, device)
    order = torch.randperm(width * len(sequences), generator=torch.Generator().manual_seed(1))
    tables = order.view(len(sequences), width).tolist()
    done = [0] * len(sequences)
    parts: list[list[torch.Tensor]] = [[] for _ in sequences]
    while done != lengths:
        turns = [
            (index, done[index], min(done[index] + chunks[index], lengths[index]))
            for index in range(len(sequences))
            if done[index] < lengths[index]
        ]
        turns.sort(key=lambda turn: (turn[2] - turn[1] > 1, turn[2]))
        single = [(index, stop) for index, start, stop in turns if stop - start == 1]
        pieces = [
            Piece(start, stop, tables[index]) for index, start, stop in turns if stop - start > 1
        ]
        attention.begin(singles(tables, single), pieces)
        packed = [
            torch.cat(
                [getattr(sequences[index], name)[:, start:stop] for index, start, stop in turns], 1
            )
            for name in "qkv"
        ]
        out = attention.attend(*packed, options)
        for (index, _, stop), part in zip(
            turns, out.split([stop - start for _, start, stop in turns]), strict=True
        ):
            parts[index].append(part)
            done[index] = stop
    return [torch.cat(part) for part in parts]


@examples(60)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 25), st.integers(1, 12)), min_size=1, max_size=5),
    block_size=st.integers(1, 5),
    reach=st.just(EVERYTHING)
    | st.builds(Reach, window=st.integers(1, 12))
    | st.builds(Reach, chunk=st.integers(1, 12)),
    softcap=st.none() | st.just(2.0),
    sinks=st.booleans(),
    backend=st.sampled_from([PLAIN, BY_BLOCK, REFERENCE]),
)
def test_chunks_and_decodes_equal_plain_attention(
    shapes, block_size, reach, softcap, sinks, backend
):
    generator = torch.Generator().manual_seed(3)
    sequences = [random_tokens(length, generator) for length, _ in shapes]
    options = AttentionOptions(
        scale=0.3,
        softcap=softcap,
        sinks=torch.linspace(-1, 1, HEADS) if sinks else None,
    )
    chunks = [chunk for _, chunk in shapes]
    paged = paged_attention(sequences, chunks, block_size, options, reach, backend)
    for tokens, actual in zip(sequences, paged, strict=True):
        expected = plain_attention(tokens, options, reach)
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


def test_contexts_of_very_different_length_decode_in_one_pass():
    generator = torch.Generator().manual_seed(4)
    sequences = [random_tokens(length, generator) for length in (1, 30, 70, 200)]
    options = AttentionOptions(scale=0.3)
    for tokens, actual in zip(
        sequences, paged_attention(sequences, [1, 29, 69, 199], 16, options), strict=True
    ):
        torch.testing.assert_close(actual, plain_attention(tokens, options), atol=1e-5, rtol=1e-4)


def test_bytes_per_token_count_keys_and_values_of_every_call():
    assert bytes_per_token([CALL, CALL], torch.bfloat16) == 2 * KV_HEADS * (8 + 6) * 2


def llama() -> torch.nn.Module:
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=20,
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"position_bias": torch.zeros(1)}, "passes `position_bias`"),
        ({"block_indices": torch.zeros(1)}, "passes `block_indices`"),
        ({"is_causal": False}, "not causal"),
        ({"something_new": 3}, "passes `something_new`"),
    ],
)
def test_an_attention_argument_we_do_not_know_is_refused(arguments, reason):
    model = llama()
    device = torch.device("cpu")
    pool = KvPool([AttentionCall(1, 8, 8)], 1, 4, torch.float32, device)
    attention = TorchPagedAttention(pool, device)
    attach(model, attention)
    attention.begin(Singles(), [Piece(0, 2, [0])])
    ids = torch.tensor([[1, 2]])
    with pytest.raises(UnservedError, match=reason):
        model(input_ids=ids, position_ids=torch.tensor([[0, 1]]), use_cache=False, **arguments)


def test_two_models_in_one_process_keep_their_own_memory():
    device = torch.device("cpu")
    runners = []
    for _ in range(2):
        model = llama()
        pool = KvPool([AttentionCall(1, 8, 8)], 1, 4, torch.float32, device)
        attention = TorchPagedAttention(pool, device)
        attach(model, attention)
        runners.append((TransformersRunner(model, attention, device), pool))
    zero = np.zeros(1, np.int64)
    packed = Packed(zero + 1, zero, Singles(), [Piece(0, 1, [0])], zero)
    runners[0][0].logits(packed)
    assert bool(runners[0][1].keys[0].any())
    assert not bool(runners[1][1].keys[0].any())


def test_decodes_are_cut_into_batches_of_similar_length_and_bounded_size():
    def sizes(contexts: list[int], most_tokens: int | None) -> list[int]:
        return [last - first for first, last in decode_groups(contexts, most_tokens)]

    assert sizes([], None) == []
    assert sizes([10, 44, 45, 88], None) == [2, 2]
    assert sizes([100] * 5, 200) == [2, 2, 1]
    assert sizes([300, 300], 200) == [1, 1]
