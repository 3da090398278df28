"""What is compiled is kept whole or not at all, whoever compiles it at the same time."""

from __future__ import annotations

import importlib.util
import sys
from contextlib import ExitStack
from pathlib import Path

import numba
import pytest

from jobrunner.engine.compiling import kept_compiled

SOURCE = """
from numba import njit, types

def made():
    return njit(types.int64(types.int64), cache=True)(twice)

def twice(x):
    return 2 * x
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    return tmp_path / "cache" / "cbjob" / "kernels"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "doubling.py"
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("doubling", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "doubling", module)
    spec.loader.exec_module(module)
    return module


def start(source, kind: str = "twice") -> int:
    """Compile as a process does at its start; return how many were found compiled."""
    with kept_compiled(kind, Path(source.__file__)):
        function = source.made()
    assert function(21) == 42
    return sum(function.stats.cache_hits.values())


def fail(source) -> None:
    with kept_compiled("twice", Path(source.__file__)):
        source.made()
        raise ZeroDivisionError


def test_what_is_compiled_is_found_at_the_next_start(cache, source):
    assert start(source) == 0
    assert start(source) == 1
    assert len(list(cache.iterdir())) == 1


def test_two_that_compile_at_once_do_not_meet(cache, source):
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(kept_compiled("twice", Path(source.__file__)))
            assert source.made()(21) == 42
    assert len(list(cache.iterdir())) == 1
    assert start(source) == 1


def test_nothing_is_kept_of_what_failed(cache, source):
    with pytest.raises(ZeroDivisionError):
        fail(source)
    assert list(cache.iterdir()) == []
    assert start(source) == 0


def test_a_file_that_changed_is_compiled_again(cache, source):
    start(source)
    Path(source.__file__).write_text(SOURCE + "# changed\n")
    assert start(source) == 0


def test_where_nothing_can_be_kept_all_is_compiled_at_every_start(cache, source, caplog):
    cache.parent.parent.mkdir()
    cache.parent.write_text("in the way")
    caplog.set_level("INFO", logger="cbjob")
    assert [start(source), start(source)] == [0, 0]
    assert f"compiled at every start: `{cache}`: Not a directory" in caplog.text


def test_a_folder_that_the_user_names_is_taken(cache, source, tmp_path, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "own"))
    start(source)
    assert [path.name.partition("-")[0] for path in (tmp_path / "own").iterdir()] == ["twice"]
    assert str(tmp_path / "own") == numba.config.CACHE_DIR
