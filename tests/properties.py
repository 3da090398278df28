"""How many examples property tests take: the same few in each run, or ever new ones in a search."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

# of a property that says nothing else
_USUAL = 100
# the same ones each time: many more would find no more
_REPEATED = 0.5
# a run of scripts/search takes so many times as many
_SEARCHED = 10


def register_profiles() -> None:
    """Let all runs take the same examples, but those with `--hypothesis-profile=search`.

    A search says how to repeat what it finds, so it looks for nothing that was found before.
    """
    repeated = int(_REPEATED * _USUAL)
    settings.register_profile("default", deadline=None, derandomize=True, max_examples=repeated)
    settings.register_profile(
        "search",
        deadline=None,
        derandomize=False,
        database=None,
        print_blob=True,
        max_examples=_SEARCHED * _USUAL,
    )
    settings.load_profile("default")


def examples(count: int, **more: Any) -> settings:
    """Settings of a property: half of `count` examples in a run, ten times `count` in a search."""
    return settings(max_examples=count * settings().max_examples // _USUAL, **more)
