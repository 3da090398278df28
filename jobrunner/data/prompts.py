"""Rows to requests, with the tokenizer of one model. Knows nothing of files of rows or tensors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from jobrunner.data.text import Decoder, Stream
from jobrunner.errors import ConfigError, ModelError
from jobrunner.records import (
    Completion,
    ErrorKind,
    Partial,
    Request,
    Row,
    RowError,
    RowId,
    Sampling,
    TextStream,
)


class Prompts:
    """Turns rows into requests and completions into text, with the tokenizer of one model.

    `kind` says what rows bring: the text of a prompt, or a list of messages. `chat` says
    whether a prompt goes through the chat template, "auto" if the model has one. Lengths are
    in tokens. `job_seed` keys the random draws by row; `seed`, if given, keys them for every
    row alike. Encoding on one thread and decoding on another is safe.

    Raises ModelError where the folder has no usable tokenizer, ConfigError where messages, a
    system prompt or `chat=True` ask for a chat template that is not there.
    """

    def __init__(
        self,
        folder: Path,
        *,
        kind: Literal["prompt", "messages"],
        system: str | None,
        chat: Literal["auto"] | bool,
        max_model_len: int,
        job_seed: int,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        stop: tuple[str, ...] = (),
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        seed: int | None = None,
    ) -> None:
        self._tokenizer = _load(folder)
        self._decoder = Decoder(self._tokenizer)
        self._template = _template(self._tokenizer)
        self._chat = self._template is not None if chat == "auto" else chat
        self._kind = kind
        self._system = system
        self._max_model_len = max_model_len
        self._job_seed = job_seed
        self._max_new_tokens = max_new_tokens
        self._temperature = temperature
        self._top_p = top_p
        self._stop = stop
        self._ignore_eos = ignore_eos
        self._seed = seed
        self._end_ids = _end_ids(folder, self._tokenizer)
        self._stop_ids = frozenset(stop_token_ids) | (frozenset() if ignore_eos else self._end_ids)
        self._stop_token_ids = tuple(stop_token_ids)
        self._check_template(folder)

    def encode(
        self, rows: Sequence[Row], resumed: Mapping[RowId, Partial]
    ) -> list[Request | Completion]:
        """Turn each row into a request, or into a completion that carries its error.

        Same length and order as `rows`. A row in `resumed` goes on after its saved tokens, as
        the next attempt.
        """
        texts = [self._text_of(row) for row in rows]
        prompts = self._tokenize(rows, texts)
        return [
            self._request(row, prompt, resumed.get(row.id))
            for row, prompt in zip(rows, prompts, strict=True)
        ]

    def text(self, completion: Completion) -> str:
        """Decode the output: no stop id, nothing from the stop string on, nothing special.

        A character is whole or, where the length cut it, exactly one U+FFFD.
        """
        tokens = completion.tokens
        if completion.stop_string is None:
            ended = completion.finish_reason == "stop" and tokens and tokens[-1] in self._stop_ids
            return self._decoder.decode(tokens[:-1] if ended else tokens)
        text = self._decoder.decode(tokens)
        found = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        return text[: min(found)] if found else text

    def open_text(self) -> TextStream:
        """Open a stream that turns the output tokens of one request into text."""
        return Stream(self._decoder)

    def describe(self) -> dict[str, object]:
        """Name what decides about requests, beside rows and the tokenizer's files, with values."""
        template = _digest(self._template) if self._chat and self._template else None
        return {
            "input kind": self._kind,
            "input.system": self._system,
            "input.chat": self._chat,
            "chat template": template,
            "end ids": sorted(self._end_ids),
            "model.max_model_len": self._max_model_len,
            "job.seed": self._job_seed,
            "generation.seed": self._seed,
            "generation.max_new_tokens": self._max_new_tokens,
            "generation.temperature": self._temperature,
            "generation.top_p": self._top_p,
            "generation.stop": list(self._stop),
            "generation.stop_token_ids": list(self._stop_token_ids),
            "generation.ignore_eos": self._ignore_eos,
        }

    def _check_template(self, folder: Path) -> None:
        if self._kind == "messages" and self._chat is False and self._template is not None:
            raise ConfigError(
                "`input.messages` needs the chat template, and `input.chat` is false",
                hint="remove `input.chat`, or give the text of prompts with `input.prompt`",
            )
        if self._template is None and (self._chat or self._kind == "messages"):
            wanted = "`input.messages`" if self._kind == "messages" else "`input.chat = true`"
            raise ConfigError(
                f"{wanted} needs a chat template, and the model in `{folder}` has none",
                hint="use a model tuned for chat, or raw prompts with `input.prompt`",
            )
        if self._system is not None and not self._chat:
            raise ConfigError(
                "`input.system` needs a chat template, and none is used",
                hint="use a model tuned for chat, or put the words into the prompts",
            )

    def _text_of(self, row: Row) -> str | RowError:
        """The text to tokenise: the prompt as it is, or rendered by the chat template."""
        value = row.value
        if value is None:
            return _error("null_prompt", row, "is null")
        if isinstance(value, bytes):
            return _bytes_error(row, value)
        if self._kind == "messages":
            fault = _messages_fault(value)
            if fault is not None:
                return _error("bad_type", row, fault)
            messages = [_without_nulls(message) for message in value]  # type: ignore[attr-defined]
            if not messages:
                return _error("empty_prompt", row, "has no messages")
            text: str | RowError = self._render(row, messages)
        elif not isinstance(value, str):
            return _error("bad_type", row, f"is of type {type(value).__name__}, not text")
        elif not self._chat:
            text = value
        elif value == "":
            return _error("empty_prompt", row, "is empty")
        else:
            text = self._render(row, [{"role": "user", "content": value}])
        if isinstance(text, str) and (fault := _text_fault(text)) is not None:
            return _error("bad_text", row, fault)
        return text

    def _render(self, row: Row, messages: list[Any]) -> str | RowError:
        if self._system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self._system}, *messages]
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # noqa: BLE001 - a template is a program, it raises anything
            return _error("template_error", row, f"makes the chat template fail: {error}")
        return text

    def _tokenize(
        self, rows: Sequence[Row], texts: Sequence[str | RowError]
    ) -> list[list[int] | RowError]:
        good = [text for text in texts if isinstance(text, str)]
        try:
            encoded: Iterator[list[int] | RowError] = iter(self._ids(good))
        except Exception:  # noqa: BLE001 - tokenizers raises bare Exception; row by row finds which
            encoded = (
                self._ids_or_error(row, text)
                for row, text in zip(rows, texts, strict=True)
                if isinstance(text, str)
            )
        return [next(encoded) if isinstance(text, str) else text for text in texts]

    def _ids_or_error(self, row: Row, text: str) -> list[int] | RowError:
        try:
            return self._ids([text])[0]
        except Exception as error:  # noqa: BLE001 - tokenizers raises bare Exception
            return _error("bad_text", row, f"cannot be tokenised: {error}")

    def _ids(self, texts: list[str]) -> list[list[int]]:
        # a template writes the special tokens itself: the tokenizer must not add its own BOS
        encodings = self._tokenizer.backend_tokenizer.encode_batch_fast(
            texts, add_special_tokens=not self._chat
        )
        return [encoding.ids for encoding in encodings]

    def _request(
        self, row: Row, prompt: list[int] | RowError, partial: Partial | None
    ) -> Request | Completion:
        if isinstance(prompt, RowError):
            return Completion(row.id, error=prompt)
        if not prompt:
            return Completion(row.id, error=_error("empty_prompt", row, "yields no tokens"))
        length = len(prompt)
        room = self._max_model_len - length
        if room < 1:
            words = f"has {length:,} tokens, limit {self._max_model_len - 1:,}"
            error = _error("prompt_too_long", row, words)
            return Completion(row.id, prompt_tokens=length, error=error)
        sampling = Sampling(
            max_new_tokens=min(self._max_new_tokens, room),
            temperature=self._temperature,
            top_p=self._top_p,
            stop=self._stop,
            stop_ids=self._stop_ids,
            draw_key=self._draw_key(row.id),
        )
        if partial is None:
            return Request(row.id, prompt, sampling)
        return Request(row.id, prompt, sampling, partial.tokens, partial.attempt + 1)

    def _draw_key(self, row: RowId, sample: int = 0) -> bytes:
        if self._seed is not None:
            parts: list[object] = [self._seed, sample]
        else:
            parts = [self._job_seed, row.shard, row.index, sample]
        # JSON keeps the parts apart: no two lists give the same bytes
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).digest()


def _load(folder: Path) -> Any:
    # loaded here, not at import: `cbjob --help` must not wait for it
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise ModelError(
            f"cannot load the tokenizer in `{folder}`: {error}",
            hint="the folder needs `tokenizer.json` and `tokenizer_config.json`",
        ) from error
    if not tokenizer.is_fast:
        raise ModelError(
            f"the tokenizer in `{folder}` is {type(tokenizer).__name__}, not a fast one",
            hint="the folder needs a `tokenizer.json`",
        )
    # some files ask for them; a prompt is never cut or padded without a word
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def _template(tokenizer: Any) -> str | None:
    if not tokenizer.chat_template:
        return None
    try:
        template: str = tokenizer.get_chat_template()
    except ValueError as error:
        raise ConfigError(f"the model's chat template cannot be used: {error}") from error
    return template


def _end_ids(folder: Path, tokenizer: Any) -> frozenset[int]:
    """Every id that ends a text: of the generation config, the config and the tokenizer."""
    found = [
        _json(folder / name).get("eos_token_id")
        for name in ("generation_config.json", "config.json")
    ]
    ids: set[int] = set()
    for value in (*found, tokenizer.eos_token_id):
        if value is not None:
            ids.update(value if isinstance(value, list) else [value])
    return frozenset(ids)


def _json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read `{path}`: {error}") from error
    return content


def _error(kind: ErrorKind, row: Row, words: str) -> RowError:
    return RowError(kind, f"row {row.id.index:,} of `{row.id.shard}` {words}")


def _bytes_error(row: Row, value: bytes) -> RowError:
    try:
        value.decode()
    except UnicodeDecodeError as error:
        return _error("bad_text", row, f"is not UTF-8: {error.reason} at byte {error.start:,}")
    return _error("bad_type", row, "is bytes, not text")


def _text_fault(text: str) -> str | None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"has a lone surrogate at character {error.start:,}"
    return None


def _messages_fault(value: object) -> str | None:
    if not isinstance(value, list):
        return f"is of type {type(value).__name__}, not a list of messages"
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict):
            return f"has as message {number} a {type(message).__name__}, not a role and content"
        if not isinstance(message.get("role"), str):
            return f"has no role in message {number}"
    return None


def _without_nulls(value: Any) -> Any:
    """Drop the keys that Arrow adds, as null, to structs that lack them."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
