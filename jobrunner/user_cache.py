"""Where this program keeps what it can make again. Knows nothing of what that is."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache_folder() -> Path:
    """Return the folder `cbjob` in the user's cache, there or not."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    # a relative XDG_CACHE_HOME is invalid and has to be ignored (XDG base directory specification)
    root = Path(cache) if Path(cache).is_absolute() else Path.home() / ".cache"
    return root / "cbjob"
