"""Tell what bytes each token of a tokenizer stands for. Knows nothing of rows."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class TokenSpelling:
    """The bytes of single tokens, spaces at their start and pieces of characters included.

    A special token stands for its name, an id that the tokenizer does not have for nothing.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._backend = tokenizer.backend_tokenizer
        added = tokenizer.added_tokens_decoder
        self._known: dict[int, bytes] = {id_: added[id_].content.encode() for id_ in added}
        state = self._backend.decoder.__getstate__() if self._backend.decoder else b""
        self._byte_level = b'"ByteLevel"' in state
        self._byte_fallback = b'"ByteFallback"' in state

    def __call__(self, token_id: int) -> bytes:
        """The bytes of one token."""
        if token_id not in self._known:
            self._known[token_id] = self._bytes_of(token_id)
        return self._known[token_id]

    def _bytes_of(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        if self._byte_level and all(letter in byte_letters() for letter in token):
            return bytes(byte_letters()[letter] for letter in token)
        return self._decoded(token_id)

    def _decoded(self, token_id: int) -> bytes:
        # a decoder may drop the space that a text begins with: see what a second one adds
        once = self._backend.decode([token_id], skip_special_tokens=False)
        twice: str = self._backend.decode([token_id, token_id], skip_special_tokens=False)
        return twice[len(once) :].encode()


@cache
def byte_letters() -> dict[str, int]:
    """The letters that byte-level tokenizers write bytes with, as GPT-2 chose them."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in shown]
    letters = {chr(byte): byte for byte in shown}
    return letters | {chr(0x100 + place): byte for place, byte in enumerate(hidden)}
