"""Keep what numba compiles from one start to the next. Knows nothing of what that is.

numba's own cache is not safe where two processes fill it at once: both number their files alike,
and one may load the code of the other. So what is compiled goes to a folder of its own, which is
renamed into place when it is complete; from then on it is only read.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

from jobrunner.user_cache import user_cache_folder

log = logging.getLogger("cbjob")


@contextmanager
def kept_compiled(kind: str, *sources: Path) -> Iterator[None]:
    """Let functions with `cache=True`, compiled meanwhile, be found at a later start.

    They stand in `sources`. All of one `kind` have to be compiled here, with their signatures.
    Where nothing can be kept it is compiled at every start, which the log says.
    """
    from numba import config

    own = config.CACHE_DIR
    root = Path(own) if own else user_cache_folder() / "kernels"
    final = root / f"{kind}-{_digest(sources)}"
    made = None if final.is_dir() else _new_folder(root)
    config.CACHE_DIR = str(made or final)
    try:
        yield
        if made is not None and made.parent == root:
            _put_in_place(made, final)
    finally:
        config.CACHE_DIR = own
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)


def _digest(sources: tuple[Path, ...]) -> str:
    """Name what the code depends on: the files as numba looks at them, numba, the processor."""
    import llvmlite
    import numba
    from llvmlite.binding import get_host_cpu_features, get_host_cpu_name

    facts = [numba.__version__, llvmlite.__version__, get_host_cpu_name()]
    facts.append(get_host_cpu_features().flatten())
    for source in sources:
        stat = source.stat()
        facts.append(f"{source} {stat.st_size} {stat.st_mtime_ns}")
    return blake2b("\n".join(facts).encode(), digest_size=8).hexdigest()


def _new_folder(root: Path) -> Path:
    try:
        root.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=".making-", dir=root))
    except OSError as error:
        log.info("kernels are compiled at every start: `%s`: %s", root, error.strerror)
        return Path(tempfile.mkdtemp(prefix="cbjob-kernels-"))


def _put_in_place(made: Path, final: Path) -> None:
    try:
        os.rename(made, final)
    except OSError as error:
        # another process was as quick, with the same code
        if not final.is_dir():
            log.info("kernels are compiled at every start: `%s`: %s", final, error.strerror)
