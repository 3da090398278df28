"""Kernels that are right pass, wrong ones are found, and what cannot run says why."""

from __future__ import annotations

import pytest
import torch

from jobrunner.engine.attention.hook import Piece, Singles, UnservedError
from jobrunner.engine.attention.plain import plain_attention
from jobrunner.engine.attention.torch_paged import TorchPagedAttention
from jobrunner.engine.kernel_checks import (
    KERNELS,
    Kernel,
    attention_error,
    check_kernels,
    projection_error,
)
from jobrunner.engine.kv import KvPool

CPU = torch.device("cpu")


class OneTooFew(TorchPagedAttention):
    """Leaves the newest token out of every decode."""

    def begin(self, singles: Singles, pieces: list[Piece]) -> None:
        super().begin(Singles(singles.table, singles.rows, singles.lengths - 1), pieces)


class MixesSequences(TorchPagedAttention):
    """Decodes with the first sequence's blocks, whichever asks."""

    def begin(self, singles: Singles, pieces: list[Piece]) -> None:
        super().begin(Singles(singles.table, singles.rows * 0, singles.lengths), pieces)


def verdict(error, dtype="float32"):
    (found,) = check_kernels("cpu", [dtype], [Kernel("attention", "tried", error)])
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_kernel_of_the_table_computes_what_its_reference_does(dtype):
    found = check_kernels("cpu", [dtype])
    assert [(v.part, v.name) for v in found] == [(k.part, k.name) for k in KERNELS]
    for one in found:
        # what cannot run here says so; nothing may be wrong
        assert one.usable or one.reason
        assert not one.wrong, one
    assert {"attention", "projection"} <= {one.part for one in found if one.usable}


@pytest.mark.parametrize("wrong", [OneTooFew, MixesSequences])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_an_attention_that_looks_elsewhere_is_found_in_every_format(wrong, dtype):
    found = verdict(attention_error(wrong), dtype)
    assert found.usable
    assert found.wrong
    assert found.error > 5 * found.limit


def test_a_projection_without_its_last_output_is_found():
    def short(x_NI, weight_OI):
        out_NO = x_NI @ weight_OI.T
        out_NO[:, -1] = 0
        return out_NO

    assert verdict(projection_error(short)).wrong


def test_numbers_that_are_not_finite_are_wrong():
    assert verdict(lambda device, dtype: float("nan")).wrong


@pytest.mark.parametrize(
    ("raised", "reason"),
    [
        (UnservedError("no kernels for torch.float16 on cpu"), "no kernels for torch.float16"),
        (ModuleNotFoundError("No module named 'numba'"), "No module named 'numba'"),
        (RuntimeError("first line\nand a trace"), "first line"),
        (NotImplementedError(), "NotImplementedError"),
    ],
)
def test_a_kernel_that_cannot_run_says_why(raised, reason):
    def refuse(pool, device):
        raise raised

    found = verdict(attention_error(refuse))
    assert (found.usable, found.wrong) == (False, False)
    assert found.reason.startswith(reason)
    assert "\n" not in found.reason


def test_plain_attention_is_what_torch_computes():
    q, k, v = (torch.randn(heads, 9, 8, dtype=torch.float64) for heads in (4, 2, 2))
    expected = torch.nn.functional.scaled_dot_product_attention(
        q[None], k[None], v[None], is_causal=True, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(plain_attention(q, k, v, 0.3), expected[0].transpose(0, 1))


def test_a_backend_is_given_a_pool_of_its_own_format():
    seen = []

    def make(pool: KvPool, device: torch.device):
        seen.append((pool.dtype, device))
        return TorchPagedAttention(pool, device)

    attention_error(make)(CPU, torch.bfloat16)
    assert seen == [(torch.bfloat16, CPU)]
