"""Which attention backend is taken, and what is said of it."""

from __future__ import annotations

import logging
import sys
from functools import partial
from pathlib import Path

import numba
import pytest
import torch

from jobrunner.engine.attention import kernels
from jobrunner.engine.attention.choice import choose_attention
from jobrunner.engine.attention.numba_paged import NumbaPagedAttention
from jobrunner.engine.attention.torch_paged import TorchPagedAttention
from jobrunner.errors import ModelError


def chosen(caplog: pytest.LogCaptureFixture, wanted, device="cpu", dtype=torch.float32):
    with caplog.at_level(logging.INFO, logger="cbjob"):
        made = choose_attention(wanted, device, dtype)
    kind = made.func if isinstance(made, partial) else made
    return kind, caplog.messages[-1]


def test_a_cpu_gets_the_kernels(caplog):
    kind, said = chosen(caplog, "auto")
    assert kind is NumbaPagedAttention
    assert said.startswith(f"attention by compiled kernels (numba {numba.__version__}): ready in")


@pytest.mark.parametrize(
    ("wanted", "device", "dtype", "reason"),
    [
        ("torch", "cpu", torch.float32, "as model.attention asks"),
        ("auto", "cuda:0", torch.bfloat16, "the kernels are for a CPU, not for cuda:0"),
        ("auto", "cpu", torch.float16, "there are no kernels for float16"),
    ],
)
def test_what_has_no_kernels_gets_torch_and_the_reason_is_said(
    caplog, wanted, device, dtype, reason
):
    kind, said = chosen(caplog, wanted, device, dtype)
    assert kind is TorchPagedAttention
    assert said == f"attention by torch: {reason}"


def test_kernels_that_cannot_be_had_are_refused_where_they_are_asked_for():
    with pytest.raises(ModelError, match='is "kernels", but there are no kernels for float16'):
        choose_attention("kernels", "cpu", torch.float16)


def test_without_numba_there_is_torch(caplog, monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    kind, said = chosen(caplog, "auto")
    assert kind is TorchPagedAttention
    assert said.startswith("attention by torch: numba cannot be imported")


def test_where_nothing_can_be_kept_the_kernels_are_compiled_at_every_start(
    caplog, monkeypatch, tmp_path: Path
):
    (tmp_path / "cbjob").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    kept = []
    monkeypatch.setattr(kernels, "compiled", lambda stored, *, keep: kept.append(keep))
    _, said = chosen(caplog, "auto")
    assert kept == [False]
    assert said.endswith(
        f"compiled at every start, as `{tmp_path}/cbjob/kernels` cannot be made: Not a directory"
    )


def test_what_is_compiled_is_kept_in_the_cache_of_the_user(caplog, monkeypatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.setattr(kernels, "compiled", lambda stored, *, keep: None)
    _, said = chosen(caplog, "auto")
    assert said.endswith(f"kept in `{tmp_path}/cbjob/kernels`")
    assert f"{tmp_path}/cbjob/kernels" == numba.config.CACHE_DIR
