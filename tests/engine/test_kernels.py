"""The CPU kernels against plain attention in float64, on random shapes."""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace

import numba
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from jobrunner.engine.attention import numba_paged
from jobrunner.engine.attention.hook import AttentionOptions, Piece, Singles, UnservedError
from jobrunner.engine.attention.kernels import _numba_threads
from jobrunner.engine.attention.numba_paged import (
    NumbaPagedAttention,
    chunk_work,
    compiled,
    decode_work,
)
from jobrunner.engine.attention.pair_kernels import PairKernels
from jobrunner.engine.attention.pair_tiles import multiplies_pairs
from jobrunner.engine.attention.threads import torch_threads
from jobrunner.engine.kv import EVERYTHING, AttentionCall, KvPool, Reach
from tests.properties import examples

CPU = torch.device("cpu")
# relative to the largest value
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 0.005}


@dataclass(frozen=True)
class Shape:
    """Of one attention call; `queries` heads for each kv head."""

    kv_heads: int
    queries: int
    key_width: int
    value_width: int


shapes = st.builds(
    Shape,
    kv_heads=st.integers(1, 3),
    queries=st.sampled_from([1, 2, 3, 4, 5, 8]),
    key_width=st.sampled_from([1, 6, 16, 64, 80, 96, 128, 192, 256]),
    value_width=st.sampled_from([1, 10, 16, 64, 80, 128, 256]),
)
reaches = (
    st.just(EVERYTHING)
    | st.builds(Reach, window=st.integers(1, 300))
    | st.builds(Reach, chunk=st.integers(1, 300))
)
# some processors have other kernels for multiples of 16
block_sizes = st.integers(1, 64) | st.sampled_from([16, 32, 48])
contexts = st.integers(1, 40) | st.integers(1, 2000)


@dataclass(frozen=True)
class Case:
    """K and V of whole sequences, heads in front, and the queries of the tokens of a pass."""

    pieces: list[tuple[int, int]]
    k: list[torch.Tensor]
    v: list[torch.Tensor]
    q: list[torch.Tensor]


def random_case(shape: Shape, pieces: list[tuple[int, int]], dtype: torch.dtype) -> Case:
    generator = torch.Generator().manual_seed(7)

    def normal(heads: int, tokens: int, width: int) -> torch.Tensor:
        # a view with the tokens in front, as a projection makes it
        return torch.randn(tokens, heads, width, generator=generator).to(dtype).transpose(0, 1)

    k = [normal(shape.kv_heads, stop, shape.key_width) for _, stop in pieces]
    v = [normal(shape.kv_heads, stop, shape.value_width) for _, stop in pieces]
    heads = shape.kv_heads * shape.queries
    q = [normal(heads, stop - start, shape.key_width) for start, stop in pieces]
    return Case(pieces, k, v, q)


def plain_attention(case: Case, options: AttentionOptions, reach: Reach) -> torch.Tensor:
    """What every token of the pass attends to, `[T, H, W]`, in float64."""
    rows = []
    for (start, stop), q, k, v in zip(case.pieces, case.q, case.k, case.v, strict=True):
        queries = q.shape[0] // k.shape[0]
        keys = k.double().repeat_interleave(queries, dim=0)
        values = v.double().repeat_interleave(queries, dim=0)
        scores = q.double() @ keys.transpose(1, 2) * options.scale
        if options.softcap is not None:
            scores = options.softcap * torch.tanh(scores / options.softcap)
        for own in range(start, stop):
            first = max(0, reach.first_seen(own))
            seen = scores[:, own - start, first : own + 1]
            if options.sinks is not None:
                seen = torch.cat([seen, options.sinks.double().unsqueeze(1)], dim=1)
            weights = seen.softmax(dim=1)[:, : own + 1 - first]
            rows.append(torch.einsum("hs,hsw->hw", weights, values[:, first : own + 1]))
    return torch.stack(rows)


def paged_attention(
    case: Case,
    options: AttentionOptions,
    reach: Reach,
    block_size: int,
) -> torch.Tensor:
    """The same by the kernels; what was before the pass is in the pool."""
    kv_heads, _, width = case.k[0].shape
    call = AttentionCall(kv_heads, width, case.v[0].shape[2], reach)
    counts = [-(-stop // block_size) for _, stop in case.pieces]
    dtype = case.k[0].dtype
    pool = KvPool([call, call], sum(counts) + 1, block_size, dtype, CPU)
    # whatever was there before must not matter
    for tensor in (*pool.keys, *pool.values):
        tensor.fill_(float("nan"))
    order = torch.randperm(sum(counts) + 1, generator=torch.Generator().manual_seed(8))
    tables = [part.tolist() for part in order[: sum(counts)].split(counts)]
    attention = NumbaPagedAttention(pool, CPU)
    store_before(attention, case, tables)
    pieces = [Piece(*piece, table) for piece, table in zip(case.pieces, tables, strict=True)]
    single = [piece for piece in pieces if piece.stop - piece.start == 1]
    attention.begin(singles_of(single), pieces[len(single) :])
    news = [
        torch.cat(
            [whole[:, start:] for (start, _), whole in zip(case.pieces, part, strict=True)], 1
        )
        for part in (case.k, case.v)
    ]
    packed = [torch.cat(case.q, dim=1), *news]
    attention.attend(*packed, options)
    return attention.attend(*packed, options)


def store_before(attention: NumbaPagedAttention, case: Case, tables: list[list[int]]) -> None:
    """Let the kernels store what was before the pass, for they alone know how."""
    before = [
        (Piece(0, start, table), q[:, :1].expand(-1, start, -1), k[:, :start], v[:, :start])
        for (start, _), q, k, v, table in zip(
            case.pieces, case.q, case.k, case.v, tables, strict=True
        )
        if start
    ]
    if before:
        pieces, *tokens = zip(*before, strict=True)
        packed = [torch.cat(parts, dim=1) for parts in tokens]
        attention.begin(Singles(), pieces)
        attention.attend(*packed, AttentionOptions(1.0))
        attention.attend(*packed, AttentionOptions(1.0))


def singles_of(pieces: list[Piece]) -> Singles:
    """The same as arrays; the rows of the table stand in another order."""
    width = max((len(piece.blocks) for piece in pieces), default=1)
    table_RL = np.full((len(pieces), width), -1, dtype=np.int32)
    rows = np.arange(len(pieces))[::-1]
    for row, piece in zip(rows, pieces, strict=True):
        table_RL[row, : len(piece.blocks)] = piece.blocks
    return Singles(table_RL, rows, np.array([piece.stop for piece in pieces], np.int64))


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape
    error = (actual.double() - expected).abs().max() / expected.abs().max()
    assert float(error) < TOLERANCE[actual.dtype]


some_settings = examples(40, suppress_health_check=[HealthCheck.too_slow])


@some_settings
@given(
    shape=shapes,
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    block_size=block_sizes,
    lengths=st.lists(contexts, max_size=5),
    chunks=st.lists(
        st.tuples(st.integers(0, 300), st.integers(2, 140)).map(lambda it: (it[0], sum(it))),
        max_size=3,
    ),
    reach=reaches,
    softcap=st.none() | st.just(2.0),
    with_sinks=st.booleans(),
)
def test_decodes_and_chunks_of_any_shape_equal_plain_attention(
    shape, dtype, block_size, lengths, chunks, reach, softcap, with_sinks
):
    pieces = [(length - 1, length) for length in lengths] + chunks or [(0, 1)]
    case = random_case(shape, pieces, dtype)
    heads = shape.kv_heads * shape.queries
    sinks = torch.linspace(-2, 3, heads) if with_sinks else None
    options = AttentionOptions(shape.key_width**-0.5, softcap, sinks)
    assert_near(
        paged_attention(case, options, reach, block_size), plain_attention(case, options, reach)
    )


@some_settings
@given(
    shape=shapes,
    lengths=st.lists(contexts, min_size=1, max_size=8),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    block_size=block_sizes,
    reach=reaches,
    with_sinks=st.booleans(),
)
def test_decodes_in_any_order_whose_contexts_are_cut_equal_plain_attention(
    shape, lengths, dtype, block_size, reach, with_sinks
):
    pieces = [(length - 1, length) for length in lengths]
    case = random_case(shape, pieces, dtype)
    sinks = torch.ones(shape.kv_heads * shape.queries) if with_sinks else None
    options = AttentionOptions(0.2, sinks=sinks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jobrunner.engine.attention.numba_paged._LEAST_PART", 50)
        actual = paged_attention(case, options, reach, block_size)
    assert_near(actual, plain_attention(case, options, reach))


@given(st.lists(st.integers(1, 500), max_size=20), st.integers(1, 200))
def test_parts_of_contexts_cover_them_once_the_longest_first(lengths, most):
    work_I4, merges_M3 = decode_work(np.array(lengths, dtype=np.int64), most)
    covered: dict[int, list[int]] = {b: [] for b in range(len(lengths))}
    parts: dict[int, list[int]] = {b: [] for b in range(len(lengths))}
    sizes = []
    for b, first, last, part in sorted(work_I4.tolist()):
        covered[b].extend(range(first, last))
        parts[b].append(part)
    for _, first, last, _ in work_I4.tolist():
        sizes.append(last - first)
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes, default=0) <= most
    assert covered == {b: list(range(length)) for b, length in enumerate(lengths)}
    merged = {b: list(range(first, last)) for b, first, last in merges_M3.tolist()}
    assert parts == {b: merged.get(b, [-1]) for b in parts}


def test_tiles_of_chunks_cover_them_once_those_that_see_most_first():
    chunks = [Piece(0, 40, []), Piece(100, 133, [])]
    assert chunk_work(chunks, first_row=5, most=32).tolist() == [
        [1, 77, 132, 133],
        [1, 45, 100, 132],
        [0, 37, 32, 40],
        [0, 5, 0, 32],
    ]


@pytest.mark.parametrize(("dtype", "block_size"), [(torch.float32, 4), (torch.bfloat16, 16)])
def test_a_value_that_is_not_a_number_reaches_the_result(dtype, block_size):
    shape = Shape(1, 2, 16, 16)
    case = random_case(shape, [(4, 5), (0, 3)], dtype)
    case.q[0][0] = float("nan")
    case.k[1][:, 1] = float("nan")
    actual = paged_attention(case, AttentionOptions(0.2), EVERYTHING, block_size)
    assert actual.isnan().any(dim=-1).tolist() == [
        [True, False],
        [False, False],
        [True, True],
        [True, True],
    ]


def test_numbers_without_kernels_are_refused():
    pool = KvPool([AttentionCall(1, 8, 8)], 1, 4, torch.float16, CPU)
    with pytest.raises(UnservedError, match=r"no kernels for torch\.float16"):
        NumbaPagedAttention(pool, CPU)
    pool = KvPool([AttentionCall(1, 8, 8)], 1, 4, torch.float32, CPU)
    attention = NumbaPagedAttention(pool, CPU)
    attention.begin(Singles(), [Piece(0, 1, [0])])
    with pytest.raises(UnservedError, match=r"attends in torch\.bfloat16"):
        attention.attend(*[torch.zeros(1, 1, 8, dtype=torch.bfloat16)] * 3, AttentionOptions(1.0))


def test_what_is_compiled_outlives_a_collection_of_garbage():
    case = random_case(Shape(1, 2, 16, 16), [(30, 31)], torch.float32)
    options = AttentionOptions(0.2)
    expected = plain_attention(case, options, EVERYTHING)
    assert_near(paged_attention(case, options, EVERYTHING, 4), expected)
    gc.collect()
    assert_near(paged_attention(case, options, EVERYTHING, 4), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [torch_threads(), _numba_threads()])
def test_each_of_the_threads_takes_other_work(threads, dtype):
    if threads is None:
        pytest.skip("torch does not come with GNU's OpenMP")
    shape = Shape(3, 2, 16, 16)
    decodes = [(length - 1, length) for length in range(100, 130)]
    case = random_case(shape, [*decodes, (7, 150), (0, 33)], dtype)
    options = AttentionOptions(0.2)
    made = replace(compiled(dtype, 16, [AttentionCall(3, 16, 16)]), run_on_threads=threads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 3)
        patch.setattr(numba_paged, "compiled", lambda *pool: made)
        actual = paged_attention(case, options, EVERYTHING, 16)
    assert_near(actual, plain_attention(case, options, EVERYTHING))


@pytest.mark.skipif(not multiplies_pairs(), reason="the processor has no products of pairs")
def test_a_pool_gets_kernels_for_pairs_where_they_serve_it(caplog):
    numba_paged._ready.cache_clear()
    with caplog.at_level("INFO", logger="cbjob"):
        served = [
            compiled(dtype, block_size, [AttentionCall(2, *widths)])
            for dtype, block_size, widths in (
                (torch.bfloat16, 16, (64, 64)),
                (torch.bfloat16, 48, (6, 80)),
                (torch.bfloat16, 8, (64, 64)),
                (torch.bfloat16, 16, (63, 64)),
                (torch.bfloat16, 16, (64, 63)),
                (torch.float32, 16, (64, 64)),
            )
        ]
    assert [isinstance(each, PairKernels) for each in served] == [True] * 2 + [False] * 4
    kinds = ("bfloat16 in pairs", "bfloat16", "float32")
    ready = [f"attention by compiled kernels (numba {numba.__version__}, {kind})" for kind in kinds]
    assert [
        said.partition(": ready in ")[0] for said in caplog.messages if "ready" in said
    ] == ready
    slower = "faster ones serve a batching.block_size that is a multiple of 16"
    assert caplog.messages.count(slower) == 1


@pytest.mark.parametrize("window", [1, 3, 40])
def test_parts_that_lie_before_the_window_are_passed_over(window):
    """The kernel once wrote in front of its buffers for them."""
    shape = Shape(2, 2, 16, 16)
    case = random_case(shape, [(299, 300), (9, 10)], torch.float32)
    options, reach = AttentionOptions(0.2), Reach(window=window)
    expected = plain_attention(case, options, reach)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jobrunner.engine.attention.numba_paged._LEAST_PART", 5)
        for _ in range(20):
            assert_near(paged_attention(case, options, reach, 64), expected)
