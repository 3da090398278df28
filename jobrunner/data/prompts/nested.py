"""Look into values made of dicts, lists and text. Knows nothing of what they mean."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

Path = tuple[str | int, ...]


def strings(value: object) -> Iterator[str]:
    """Every text in a value, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from strings(key)
            yield from strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings(item)


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A copy with every text changed, keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {map_strings(k, change): map_strings(v, change) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map_strings(item, change) for item in value)
    return value


def without_nulls(value: Any) -> Any:
    """Drop the keys that Arrow adds, as null, to structs that lack them."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def text_paths(value: object) -> Iterator[Path]:
    """Where texts stand in a value, keys left out."""
    if isinstance(value, str):
        yield ()
    elif isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            for path in text_paths(item):
                yield (key, *path)


def at(value: Any, path: Path) -> Any:
    """What stands at a path."""
    for key in path:
        value = value[key]
    return value


def with_text(value: Any, path: Path, text: str) -> Any:
    """A copy of a value with another text at a path."""
    if not path:
        return text
    key, *rest = path
    copy = value.copy()
    copy[key] = with_text(value[key], tuple(rest), text)
    return copy
