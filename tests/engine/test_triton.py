"""The kernels, interpreted or on a GPU where there is one, against plain attention."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jobrunner.engine.attention.hook import AttentionOptions, Piece, Singles
from jobrunner.engine.attention.triton_tiles import decode_splits, decode_tiles
from jobrunner.engine.block_pool import BlockPool
from jobrunner.engine.kv import EVERYTHING, AttentionCall, KvPool, Reach
from jobrunner.records import Request, RowId, Sampling
from tests.properties import examples

triton = pytest.importorskip("triton", reason="triton is not installed")

from jobrunner.engine.attention import triton_launch as kernels  # noqa: E402
from jobrunner.engine.attention.device_paged import DevicePagedAttention  # noqa: E402
from jobrunner.engine.attention.varlen_prefill import VarlenPrefill  # noqa: E402
from tests.engine import test_attention as plain  # noqa: E402
from tests.engine import test_transformers as engines  # noqa: E402

ROOT = Path(__file__).parents[2]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CALM = examples(12)

# the oldest interpreters read numbers in a way that this numpy no longer has
old = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
if old and np.lib.NumpyVersion(np.__version__) >= "2.4.0" and DEVICE.type == "cpu":
    pytest.skip(f"triton {triton.__version__} interprets with numpy < 2.4", allow_module_level=True)


def expected_decode(
    q_HD: torch.Tensor,
    k_KSD: torch.Tensor,
    v_KSW: torch.Tensor,
    options: AttentionOptions,
    reach: Reach,
) -> torch.Tensor:
    """What the last of S tokens attends to, `[H, W]`, in float64."""
    length = k_KSD.shape[1]
    first = max(0, int(reach.first_seen(length - 1)))
    group = q_HD.shape[0] // k_KSD.shape[0]
    k_HSD = k_KSD[:, first:].double().repeat_interleave(group, 0)
    v_HSW = v_KSW[:, first:].double().repeat_interleave(group, 0)
    scores_HS = torch.einsum("hd,hsd->hs", q_HD.double(), k_HSD) * options.scale
    if options.softcap is not None:
        scores_HS = options.softcap * torch.tanh(scores_HS / options.softcap)
    if options.sinks is not None:
        scores_HS = torch.cat([scores_HS, options.sinks.double().unsqueeze(1)], 1)
    weights_HS = scores_HS.softmax(1)[:, : k_HSD.shape[1]]
    return torch.einsum("hs,hsw->hw", weights_HS, v_HSW)


def check_decode(
    lengths: list[int],
    *,
    kv_heads: int = 1,
    group: int = 2,
    key_width: int = 16,
    value_width: int = 16,
    block_size: int = 16,
    splits: int = 1,
    dtype: torch.dtype = torch.float32,
    reach: Reach = EVERYTHING,
    softcap: float | None = None,
    sinks: bool = False,
    make_pool: type[KvPool] = BlockPool,
) -> None:
    """Decode one token of each sequence from scattered blocks, and compare."""
    torch.manual_seed(len(lengths) + sum(lengths))
    heads, width = kv_heads * group, -(-max(lengths) // block_size)
    call = AttentionCall(kv_heads, key_width, value_width)
    count = width * len(lengths)
    pool = make_pool([call], count, block_size, dtype, DEVICE)
    pool.keys[0].normal_()
    pool.values[0].normal_()
    # rows of the table that nobody asks for lie between
    table = torch.randperm(count).view(len(lengths), width).int()
    rows_B = torch.arange(len(lengths)) * 2
    spaced = torch.full((2 * len(lengths), width + 1), 10**6, dtype=torch.int32)
    spaced[::2, :width] = table
    q_HBD = torch.randn(len(lengths), heads, key_width).to(dtype).transpose(0, 1).to(DEVICE)
    out_BHW = torch.full((len(lengths), heads, value_width), torch.nan, dtype=dtype, device=DEVICE)
    options = AttentionOptions(
        scale=key_width**-0.5,
        softcap=softcap,
        sinks=torch.linspace(-2, 2, heads, device=DEVICE) if sinks else None,
    )
    kernels.decode(
        out_BHW,
        q_HBD,
        pool.keys[0],
        pool.values[0],
        spaced.to(DEVICE),
        rows_B.to(DEVICE),
        torch.tensor(lengths, device=DEVICE),
        options,
        reach,
        splits,
    )
    tolerance = 1e-5 if dtype == torch.float32 else 3e-3
    for row, length in enumerate(lengths):
        k_KSD, v_KSW = pool.gather(0, table[row].long().to(DEVICE))
        expected_HW = expected_decode(
            q_HBD[:, row], k_KSD[:, :length], v_KSW[:, :length], options, reach
        )
        torch.testing.assert_close(
            out_BHW[row].double(), expected_HW, atol=tolerance, rtol=tolerance
        )


@CALM
@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=3).map(sorted),
    kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 3, 4, 7]),
    key_width=st.sampled_from([8, 20, 32]),
    value_width=st.sampled_from([6, 32]),
    block_size=st.sampled_from([1, 3, 16, 32, 64]),
    splits=st.sampled_from([1, 2, 4]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    reach=st.just(EVERYTHING)
    | st.builds(Reach, window=st.integers(1, 100))
    | st.builds(Reach, chunk=st.integers(1, 100)),
    softcap=st.none() | st.just(2.0),
    sinks=st.booleans(),
    make_pool=st.sampled_from([BlockPool, KvPool]),
)
def test_decodes_equal_plain_attention(lengths, **case):
    check_decode(lengths, **case)


@pytest.mark.parametrize("width", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_heads_of_every_usual_width_decode(width: int, dtype: torch.dtype):
    check_decode([3, 80], key_width=width, value_width=width, dtype=dtype, splits=2)


@pytest.mark.parametrize("length", [15, 16, 17, 63, 64, 65, 128])
def test_contexts_at_the_edges_of_blocks_tiles_and_splits_decode(length: int):
    check_decode([length], splits=2)


@pytest.mark.parametrize("reach", [Reach(window=1), Reach(window=64), Reach(chunk=64)])
def test_a_reach_at_the_edges_of_tiles_decodes(reach: Reach):
    check_decode([1, 64, 65, 128], splits=4, reach=reach, sinks=True)


def test_more_query_heads_than_one_program_takes_share_a_kv_head():
    check_decode([40], group=40, splits=2)


def test_scores_that_overflow_an_exponential_are_capped():
    torch.manual_seed(0)
    pool = BlockPool([AttentionCall(1, 16, 16)], 1, 16, torch.float32, DEVICE)
    pool.keys[0].fill_(100.0)
    pool.values[0].normal_()
    out_BHW = torch.full((1, 1, 16), torch.nan, device=DEVICE)
    zero = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
    length = torch.tensor([16], dtype=torch.int32, device=DEVICE)
    options = AttentionOptions(scale=1.0, softcap=1.0)
    q_HBD = torch.full((1, 1, 16), 100.0, device=DEVICE)
    kernels.decode(
        out_BHW, q_HBD, pool.keys[0], pool.values[0], zero, zero[0], length, options, EVERYTHING, 1
    )
    torch.testing.assert_close(out_BHW[0, 0], pool.values[0][0, 0].mean(0), atol=1e-5, rtol=1e-5)


@examples(8)
@given(
    heads=st.integers(1, 5),
    key_width=st.sampled_from([8, 20]),
    value_width=st.sampled_from([6, 32]),
    block_size=st.sampled_from([1, 5, 16]),
    tokens=st.integers(1, 9),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    make_pool=st.sampled_from([BlockPool, KvPool]),
)
def test_keys_and_values_are_written_where_plain_torch_writes_them(
    heads, key_width, value_width, block_size, tokens, dtype, make_pool
):
    torch.manual_seed(tokens)
    call = AttentionCall(heads, key_width, value_width)
    blocks = -(-12 // block_size)
    ours, expected = (make_pool([call], blocks, block_size, dtype, DEVICE) for _ in range(2))
    slots_T = torch.randperm(blocks * block_size)[:tokens].to(DEVICE)
    # as a model passes them: the heads of a token beside each other
    k_KTD = torch.randn(tokens, heads, key_width).to(dtype).transpose(0, 1).to(DEVICE)
    v_KTW = torch.randn(tokens, heads, value_width).to(dtype).transpose(0, 1).to(DEVICE)
    kernels.write(ours.keys[0], ours.values[0], k_KTD, v_KTW, slots_T)
    expected.write(0, slots_T, k_KTD, v_KTW)
    assert torch.equal(ours.keys[0], expected.keys[0])
    assert torch.equal(ours.values[0], expected.values[0])


@pytest.mark.parametrize("elements", [5, 2048, 2049])
def test_blocks_are_gathered_and_scattered(elements: int):
    pool_NE = torch.randn(6, elements).half().to(DEVICE)
    blocks = torch.tensor([5, 0, 3], device=DEVICE)
    staged_NE = torch.empty(3, elements, dtype=torch.float16, device=DEVICE)
    kernels.gather_blocks(pool_NE, blocks, staged_NE)
    assert torch.equal(staged_NE, pool_NE[blocks])
    other_NE = torch.zeros_like(pool_NE)
    kernels.scatter_blocks(other_NE, blocks, staged_NE)
    assert torch.equal(other_NE[blocks], pool_NE[blocks])
    assert not bool(other_NE[[1, 2, 4]].any())


def test_a_tensor_whose_heads_are_scattered_is_refused():
    tensor = torch.zeros(1, 4, 8, device=DEVICE).transpose(1, 2)
    keys = torch.zeros(1, 2, 4, 4, device=DEVICE)
    with pytest.raises(ValueError, match="reaches an attention kernel"):
        kernels.write(keys, keys, tensor, tensor, torch.zeros(8, dtype=torch.long, device=DEVICE))


def test_few_long_contexts_are_split_and_many_are_not():
    assert decode_splits(1, 8, 132) == 32
    assert decode_splits(16, 8, 132) == 8
    assert decode_splits(256, 8, 132) == 1


@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("width", [16, 64, 80, 128, 256])
def test_tiles_in_flight_fit_the_smallest_gpu(width: int, element_bytes: int):
    tiles = decode_tiles(4, width, width, element_bytes)
    tile_bytes = tiles.tokens * tiles.key_width * element_bytes
    assert 2 * tile_bytes * (tiles.stages - 1) < 90 * 1024
    assert tiles.tokens >= 16


def ragged_attention(
    q_THD: torch.Tensor,
    k_SKD: torch.Tensor,
    v_SKD: torch.Tensor,
    starts_q: torch.Tensor,
    starts_k: torch.Tensor,
    longest_q: int,
    longest_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
) -> torch.Tensor:
    """What torch's kernel for ragged batches does, one query after the other."""
    assert window_size[1] == 0
    out_THD = torch.empty_like(q_THD)
    group = q_THD.shape[1] // k_SKD.shape[1]
    for piece in range(len(starts_q) - 1):
        queries = range(int(starts_q[piece]), int(starts_q[piece + 1]))
        first, last = int(starts_k[piece]), int(starts_k[piece + 1])
        assert len(queries) <= longest_q
        assert last - first <= longest_k
        for row in queries:
            own = last - (queries.stop - row)
            begin = first if window_size[0] < 0 else max(first, own - window_size[0])
            k_HSD = k_SKD[begin : own + 1].transpose(0, 1).repeat_interleave(group, 0)
            v_HSD = v_SKD[begin : own + 1].transpose(0, 1).repeat_interleave(group, 0)
            weights_HS = (torch.einsum("hd,hsd->hs", q_THD[row], k_HSD) * scale).softmax(1)
            out_THD[row] = torch.einsum("hs,hsd->hd", weights_HS, v_HSD)
    return out_THD


def with_ragged(pool: KvPool, device: torch.device) -> DevicePagedAttention:
    return DevicePagedAttention(
        kernels, pool, device, VarlenPrefill(pool, device, ragged_attention)
    )


@pytest.mark.skipif(DEVICE.type != "cpu", reason="scripts/gpu_check does this on a GPU")
@pytest.mark.parametrize("make_attention", [partial(DevicePagedAttention, kernels), with_ragged])
@pytest.mark.parametrize(
    ("reach", "softcap"),
    [
        (EVERYTHING, None),
        (Reach(window=5), None),
        (Reach(chunk=6), None),
        (EVERYTHING, 2.0),
    ],
)
def test_passes_of_decodes_and_chunks_equal_plain_attention(
    make_attention, reach, softcap, monkeypatch
):
    monkeypatch.setattr(plain, "VALUE_WIDTH", plain.KEY_WIDTH)
    monkeypatch.setattr(plain, "CALL", AttentionCall(2, plain.KEY_WIDTH, plain.KEY_WIDTH))
    generator = torch.Generator().manual_seed(5)
    sequences = [plain.random_tokens(length, generator) for length in (2, 14, 20)]
    options = AttentionOptions(scale=0.3, softcap=softcap)
    backend = plain.Backend(BlockPool, make_attention)
    paged = plain.paged_attention(sequences, [1, 13, 7], 4, options, reach, backend)
    for tokens, actual in zip(sequences, paged, strict=True):
        expected = plain.plain_attention(tokens, options, reach)
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


def test_what_torch_cannot_serve_is_said_once(caplog: pytest.LogCaptureFixture):
    pool = BlockPool([AttentionCall(1, 16, 16)] * 2, 1, 16, torch.float32, DEVICE)
    attention = DevicePagedAttention(kernels, pool, DEVICE)
    one = torch.zeros(1, 2, 16, device=DEVICE)
    with caplog.at_level(logging.INFO, "cbjob"):
        for _ in range(2):
            attention.begin(Singles(), [Piece(0, 2, [0])])
            for _ in pool.calls:
                attention.attend(one, one, one, AttentionOptions(scale=1.0))
    assert caplog.messages == [
        "prompts are attended to by plain torch, more slowly: the model computes in float32"
    ]


def test_an_engine_on_the_kernels_gives_the_tokens_of_generate(llama: Path):
    prompts = [[3, 1, 4, 1, 5, 9, 2], [2, 7]]
    rows = [Request(RowId("s", i), prompt, Sampling(3)) for i, prompt in enumerate(prompts)]
    _, done = engines.serve(
        llama, rows, attention="triton", chunk_size=4, max_batch_size=2, device=DEVICE.type
    )
    assert [done[index].tokens for index in range(2)] == engines.generate(llama, prompts, 3)


def built(grid: str) -> list[dict[str, object]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    child = subprocess.run(
        [sys.executable, "-m", "tests.engine.build_kernels", grid],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    return [json.loads(line) for line in child.stdout.splitlines()]


# of one block of threads, on the smallest of an architecture
SHARED_BYTES = {80: 99 * 1024, 90: 227 * 1024}


def check_builds(binaries: list[dict[str, object]]) -> None:
    for binary in binaries:
        assert binary["shared_bytes"] <= SHARED_BYTES[binary["architecture"]], binary
        assert binary["cubin_bytes"] > 0, binary
    # keys and values are fetched ahead, 16 bytes at a time
    decodes = [binary for binary in binaries if "decode" in binary["label"]]
    assert all(binary["async_copies"] for binary in decodes)


def test_every_kernel_builds_for_ampere_and_hopper():
    binaries = built("few")
    check_builds(binaries)
    assert len(binaries) == 2 * 18


@pytest.mark.slow
def test_every_kernel_builds_for_all_number_formats_widths_and_variants():
    binaries = built("all")
    check_builds(binaries)
    assert len(binaries) > 400
