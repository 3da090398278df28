"""Keep text that spells a special token text, and a template's own special tokens special.

Texts of users are marked before a template is rendered: a mark inside each spelling. What is
spelled without a mark in the rendered text was written by the template.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple

from jobrunner.data.prompts.faults import RowFault
from jobrunner.data.prompts.nested import map_strings, strings


class Literal:
    """Marks what users spelled, and encodes marked text. Not for several threads.

    Encoding is the tokenizer's own, in one piece: a second tokenizer takes special tokens for
    text, and has one more token for each, spelled as nobody can guess, that the template's
    special tokens are replaced by.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        # one character alone cannot be broken up; such tokens are white space, if there are any
        self._specials = {
            token.content: (token_id, token)
            for token_id, token in added.items()
            if token.special and len(token.content) > 1
        }
        # digits: no filter of a template changes them, and nobody can have written these
        self._mark, self._secret = _secret(), _secret()
        spelling = "|".join(map(re.escape, sorted(self._specials, key=len, reverse=True)))
        self._spelling = re.compile(spelling or "(?!)")
        self._start = re.compile(f"(?s)(?={self._spelling.pattern})(.)")
        # the rest may follow in the next text
        beginnings = {text[:size] for text in self._specials for size in range(1, len(text))}
        listed = "|".join(map(re.escape, sorted(beginnings, key=len, reverse=True)))
        self._open_end = re.compile(f"(?:{listed or '(?!)'})\\Z")
        longest = max(map(len, self._specials), default=1)
        self._tail = max(1, longest - 1)

    def spelled_in(self, value: object) -> bool:
        """Whether a special token is spelled, or begun at the end, in any text of a value."""
        return any(self._is_spelled(text) for text in strings(value))

    def mark(self, value: Any) -> Any:
        """A copy of a value with all that spells a special token marked."""
        return map_strings(value, self._marked)

    def encode(self, text: str, *, whole: bool) -> list[int]:
        """Token ids of a rendered text; `whole` ones get what the tokenizer adds.

        Raises RowFault where the tokenizer makes a special token of text all the same.
        """
        own = self._spelling.sub(lambda match: self._copy.stand_ins[match[0]], text)
        ids = self._ids(own.replace(self._mark, ""), whole=whole)
        if ids is None:
            # the model of the tokenizer itself knows the spelling: break it up
            ids = self._ids(own.replace(self._mark, self._copy.breaks), whole=whole)
        if ids is None:
            raise RowFault("bad_text", "spells special tokens in a way that cannot be broken up")
        return ids

    def _is_spelled(self, text: str) -> bool:
        return bool(
            self._spelling.search(text)
            or self._open_end.search(text, max(0, len(text) - self._tail))
        )

    def _marked(self, text: str) -> str:
        ends_open = self._open_end.search(text, max(0, len(text) - self._tail))
        # after the first character, so that trimming a text leaves the mark in it
        marked = self._start.sub(rf"\g<1>{self._mark}", text)
        return marked + self._mark if ends_open else marked

    def _ids(self, text: str, *, whole: bool) -> list[int] | None:
        """Token ids, None if text came out as a special token."""
        copy = self._copy
        encoding = copy.backend.encode(text, add_special_tokens=whole)
        added = encoding.special_tokens_mask
        if any(
            token_id in copy.special_ids and not by_tokenizer
            for token_id, by_tokenizer in zip(encoding.ids, added, strict=True)
        ):
            return None
        return [copy.meant.get(token, token) for token in encoding.ids if token != copy.break_id]

    @cached_property
    def _copy(self) -> _Copy:
        # made when first needed: a second tokenizer takes its time and memory
        from tokenizers import AddedToken, Tokenizer

        backend = Tokenizer.from_str(self._backend.to_str())
        backend.encode_special_tokens = True
        breaks = f"b{self._secret}b"
        stand_ins, tokens = {}, []
        for content, (token_id, token) in self._specials.items():
            stand_ins[content] = f"t{self._secret}t{token_id}t"
            flags = {
                name: getattr(token, name)
                for name in ("single_word", "lstrip", "rstrip", "normalized")
            }
            tokens.append(AddedToken(stand_ins[content], special=False, **flags))
        backend.add_tokens([*tokens, AddedToken(breaks, special=False, normalized=False)])
        meant = {
            backend.token_to_id(stand_in): self._specials[content][0]
            for content, stand_in in stand_ins.items()
        }
        special_ids = frozenset(token_id for token_id, _ in self._specials.values())
        break_id = backend.token_to_id(breaks)
        return _Copy(backend, stand_ins, meant, special_ids, breaks, break_id)


def _secret() -> str:
    return str(10**23 + secrets.randbelow(9 * 10**23))


class _Copy(NamedTuple):
    """A tokenizer that takes special tokens for text; `meant` says what its stand-ins are."""

    backend: Any
    stand_ins: Mapping[str, str]
    meant: Mapping[int | None, int]
    special_ids: frozenset[int]
    breaks: str
    break_id: int | None
