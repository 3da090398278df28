"""Damage the bytes of a file: flipped, overwritten, cut out, put in, doubled, cut short."""

from __future__ import annotations

import random
from collections.abc import Callable

Mutation = Callable[[bytearray, random.Random], None]
_INTERESTING = (b"\0", b"\xff", b"\n", b'"', b"\x7f\xff\xff\xff", b"\x80\0\0\0", b"PAR1", b"\xed")


def mutate(content: bytes, rng: random.Random) -> bytes:
    """Damage a content one to a few times."""
    damaged = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        rng.choice(_MUTATIONS)(damaged, rng)
    return bytes(damaged)


def _place(content: bytearray, rng: random.Random) -> int:
    """Anywhere, but more often near the ends, where files say what they are."""
    size = len(content)
    if rng.random() < 0.3:
        return min(size, rng.randint(0, 64))
    if rng.random() < 0.5:
        return max(0, size - rng.randint(0, 600))
    return rng.randint(0, size)


def _flip(content: bytearray, rng: random.Random) -> None:
    if content:
        place = min(_place(content, rng), len(content) - 1)
        content[place] ^= 1 << rng.randint(0, 7)


def _overwrite(content: bytearray, rng: random.Random) -> None:
    place, piece = _place(content, rng), rng.choice(_INTERESTING)
    content[place : place + len(piece)] = piece


def _insert(content: bytearray, rng: random.Random) -> None:
    place = _place(content, rng)
    content[place:place] = rng.choice((rng.choice(_INTERESTING), rng.randbytes(rng.randint(1, 9))))


def _remove(content: bytearray, rng: random.Random) -> None:
    place = _place(content, rng)
    del content[place : place + rng.randint(1, 40)]


def _double(content: bytearray, rng: random.Random) -> None:
    place = _place(content, rng)
    content[place:place] = content[place : place + rng.randint(1, 200)]


def _cut_short(content: bytearray, rng: random.Random) -> None:
    del content[_place(content, rng) :]


def _zero(content: bytearray, rng: random.Random) -> None:
    place = _place(content, rng)
    size = min(rng.randint(1, 100), len(content) - place)
    content[place : place + size] = bytes(size)


_MUTATIONS: tuple[Mutation, ...] = (
    _flip,
    _flip,
    _flip,
    _overwrite,
    _insert,
    _remove,
    _double,
    _cut_short,
    _zero,
)
