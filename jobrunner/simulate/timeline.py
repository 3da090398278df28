"""Draw slots × steps as text and as an SVG image. Knows nothing of schedulers or files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import groupby

# what each slot did in a step, one byte a slot
Places = bytes
IDLE, PREFILL, DECODE, KEPT = range(4)

_MARKS = "·▓█░"
_NAMES = ("idle", "prefill", "decode", "finished, keeps its place")
_COLOURS = ("#f4f4f4", "#e8890c", "#2f6fb5", "#b9c4d0")

_SVG_COLUMNS = 600
_SVG_ROWS = 64
_SVG_WIDTH = 900
_MARGIN = 12
_TITLE_HEIGHT = 26


class Timeline:
    """What the slots of one worker did, step by step; steps that computed nothing are left out.

    There are as many `slots` as are given, or as were in use.
    """

    def __init__(self, slots: int = 0) -> None:
        self._slots = slots
        self._steps: list[Places] = []

    def add(self, places: Places) -> None:
        """Take in one step."""
        self._steps.append(places)
        self._slots = max(self._slots, len(places))

    @property
    def steps(self) -> int:
        return len(self._steps)

    def rows(self, most_rows: int, most_columns: int) -> list[Places]:
        """One entry a slot, one byte a step; neighbours share a cell where there are too many.

        A shared cell shows what most of its places did; of equals, the one that did more.
        """
        steps = [places.ljust(self._slots, b"\0") for places in self._steps]
        columns = [_common(group) for group in _groups(steps, most_columns)]
        slots = [bytes(column[slot] for column in columns) for slot in range(self._slots)]
        return [_common(group) for group in _groups(slots, most_rows)]


def _groups(entries: Sequence[Places], most: int) -> Iterator[Sequence[Places]]:
    size = max(1, -(-len(entries) // most))
    for start in range(0, len(entries), size):
        yield entries[start : start + size]


def _common(group: Sequence[Places]) -> Places:
    """What most of a group of equally long entries say, place by place."""
    if len(group) == 1:
        return group[0]
    return bytes(
        max(range(4), key=lambda kind: (place.count(kind), kind))
        for place in map(bytes, zip(*group, strict=True))
    )


def legend() -> str:
    """What the marks of `text` mean."""
    return "   ".join(f"{mark} {name}" for mark, name in zip(_MARKS, _NAMES, strict=True))


def text(timeline: Timeline, rows: int, columns: int) -> list[str]:
    """The timeline in characters: a line a slot, steps from left to right."""
    return ["".join(_MARKS[kind] for kind in row) for row in timeline.rows(rows, columns)]


def svg(timelines: Mapping[str, Timeline]) -> str:
    """One image with a panel for each of the named timelines, all on one scale of steps."""
    longest = max((timeline.steps for timeline in timelines.values()), default=0)
    parts: list[str] = []
    top = float(_MARGIN)
    for name, timeline in timelines.items():
        title = f"{name}: {timeline.steps:,} steps"
        parts.append(f'<text x="{_MARGIN}" y="{top + 14}">{escape(title)}</text>')
        top += _TITLE_HEIGHT
        panel, height = _panel(timeline, longest, top)
        parts += panel
        top += height + _MARGIN
    return "\n".join([_head(top + _TITLE_HEIGHT), *parts, *_key(top), "</svg>", ""])


def _head(height: float) -> str:
    width = _SVG_WIDTH + 2 * _MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height:g}"'
        f' viewBox="0 0 {width} {height:g}" font-family="sans-serif" font-size="13">\n'
        f'<rect width="{width}" height="{height:g}" fill="#ffffff"/>'
    )


def _panel(timeline: Timeline, longest: int, top: float) -> tuple[list[str], float]:
    """Rectangles, one for each stretch of a slot that did the same; and how high they are."""
    rows = timeline.rows(_SVG_ROWS, _SVG_COLUMNS)
    if not timeline.steps:
        return [], 0.0
    line = max(3.0, min(18.0, 240 / len(rows)))
    cell = _SVG_WIDTH * timeline.steps / longest / len(rows[0])
    rectangles = []
    for number, row in enumerate(rows):
        left = float(_MARGIN)
        for kind, stretch in groupby(row):
            width = cell * len(list(stretch))
            rectangles.append(
                f'<rect x="{left:.2f}" y="{top + number * line:.2f}" width="{width:.2f}"'
                f' height="{line * 0.86:.2f}" fill="{_COLOURS[kind]}"/>'
            )
            left += width
    return rectangles, line * len(rows)


def _key(top: float) -> list[str]:
    parts, left = [], _MARGIN
    for colour, name in zip(_COLOURS, _NAMES, strict=True):
        parts.append(f'<rect x="{left}" y="{top:.2f}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{left + 17}" y="{top + 11:.2f}">{escape(name)}</text>')
        left += 45 + 8 * len(name)
    return parts
