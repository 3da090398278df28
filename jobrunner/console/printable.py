"""Keep what could act on a terminal off it. Knows nothing of where text comes from."""

from __future__ import annotations


def printable(line: str) -> str:
    """Replace what could act on a terminal or break a line: names and messages come from data."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line)


def printable_lines(text: str) -> str:
    """Clean each line, the later ones indented, so that no data can pass for a line of ours."""
    return "\n  ".join(printable(line) for line in text.split("\n"))
