"""Output tokens back to text, whole or as they come. Knows nothing of rows or prompts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

_REPLACEMENT = "\ufffd"
# a stream decodes this many tokens again for every new one; old ones beyond them are dropped
_WINDOW_TOKENS = 24
_CONTEXT_TOKENS = 8


class Decoder:
    """Decodes output tokens. Bytes that are not UTF-8 give one U+FFFD per broken character."""

    def __init__(self, tokenizer: Any) -> None:
        self._backend = tokenizer.backend_tokenizer
        self.special = frozenset(
            token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special
        )
        self._byte_of, self._id_of = _byte_tokens(self._backend)

    def decode(self, tokens: Sequence[int]) -> str:
        shown = [token for token in tokens if token not in self.special]
        if self._byte_of:
            shown = self._with_valid_bytes(shown)
        text: str = self._backend.decode(shown, skip_special_tokens=True)
        return text

    def _with_valid_bytes(self, tokens: list[int]) -> list[int]:
        # byte fallback turns a whole run of byte tokens into U+FFFDs if one character is broken
        mended: list[int] = []
        for is_bytes, run in groupby(tokens, key=self._byte_of.__contains__):
            if is_bytes:
                raw = bytes(self._byte_of[token] for token in run)
                mended += [self._id_of[byte] for byte in raw.decode(errors="replace").encode()]
            else:
                mended += run
        return mended


class Stream:
    """Text of one output as it grows; a character appears once all its bytes are there.

    Not the DecodeStream of tokenizers: that one raises where a broken character follows a
    whole one in byte tokens, and holds back text before an unfinished character.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._window: list[int] = []
        self._shown = ""

    def step(self, token: int) -> str:
        """The text that became complete with this token."""
        if token in self._decoder.special:
            return ""
        self._window.append(token)
        text = self._decoder.decode(self._window)
        complete = text.removesuffix(_REPLACEMENT)
        new = complete[len(self._shown) :]
        if len(self._window) >= _WINDOW_TOKENS:
            # what follows is decoded after some context, so that spaces at its start stay
            self._window = self._window[-_CONTEXT_TOKENS:]
            complete = self._decoder.decode(self._window).removesuffix(_REPLACEMENT)
        self._shown = complete
        return new


def _byte_tokens(backend: Any) -> tuple[dict[int, int], dict[int, int]]:
    """Byte by token id and token id by byte, both empty without byte fallback."""
    if b'"ByteFallback"' not in (backend.decoder.__getstate__() if backend.decoder else b""):
        return {}, {}
    ids = {byte: backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256)}
    if None in ids.values():
        return {}, {}
    return {token_id: byte for byte, token_id in ids.items()}, ids
