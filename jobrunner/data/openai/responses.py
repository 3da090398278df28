"""Write outcomes as the lines of OpenAI's response and error files. Knows nothing of files.

An error has the shape that OpenAI's error files show for a request that was refused: a response
with status 400 (500 for our own fault) whose body says why; `error`, which is for requests that
were never tried, is null.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from jobrunner.data.openai.requests import Asker
from jobrunner.records import RowId

# the bytes that a token stands for
TokenBytes = Callable[[int], bytes]

# OpenAI's word for a log-probability that is too small to tell
_VERY_UNLIKELY = -9999.0
_INDEX_DIGITS = 12
_FINISH_REASONS = {"stop": "stop", "length": "length", "repetition": "stop"}
_CODES: dict[str, str] = {"prompt_too_long": "context_length_exceeded"}
_KINDS = {code: kind for kind, code in _CODES.items()}


def line_id(row: RowId) -> str:
    """Name a row: always the same name, another for each row."""
    shard = hashlib.blake2b(row.shard.encode(errors="surrogatepass"), digest_size=8)
    return f"{shard.hexdigest()}{row.index:0{_INDEX_DIGITS}x}"


def row_index(name: str) -> int:
    """The index of the row that a `line_id` names, wherever it is part of a name."""
    return int(name[-_INDEX_DIGITS:], 16)


def error_kind(code: str) -> str:
    """Our word for the code of an error."""
    return _KINDS.get(code, code)


def response_line(
    row: RowId,
    asker: Asker,
    outcome: Mapping[str, Any],
    *,
    model: str,
    created_s: int,
    token_bytes: TokenBytes,
) -> dict[str, Any]:
    """Make the line of the response file for a row with an answer.

    `outcome` has the columns of OUTCOME_SCHEMA and `samples`; `created_s` is in Unix seconds.
    """
    samples = outcome["samples"]
    choices = [_choice(index, asker.chat, one, token_bytes) for index, one in enumerate(samples)]
    body = {
        "id": f"{'chatcmpl' if asker.chat else 'cmpl'}-{line_id(row)}",
        "object": "chat.completion" if asker.chat else "text_completion",
        "created": created_s,
        "model": model,
        "choices": choices,
        "usage": {
            "prompt_tokens": outcome["prompt_tokens"],
            "completion_tokens": outcome["output_tokens"],
            "total_tokens": outcome["prompt_tokens"] + outcome["output_tokens"],
        },
        "system_fingerprint": None,
    }
    return _line(row, asker, 200, body)


def error_line(row: RowId, asker: Asker, outcome: Mapping[str, Any]) -> dict[str, Any]:
    """Make the line of the error file for a row without an answer."""
    kind = outcome["error_kind"]
    ours = kind == "internal"
    error = {
        "message": outcome["error"],
        "type": "server_error" if ours else "invalid_request_error",
        "param": None,
        "code": _CODES.get(kind, kind),
    }
    return _line(row, asker, 500 if ours else 400, {"error": error})


def encoded(line: Mapping[str, Any]) -> bytes:
    """Encode a line, with its end."""
    try:
        return f"{json.dumps(line, ensure_ascii=False, allow_nan=False)}\n".encode()
    except UnicodeEncodeError:
        # half of a surrogate pair in a custom_id: only an escape can say it again
        return f"{json.dumps(line, allow_nan=False)}\n".encode()


def _line(row: RowId, asker: Asker, status: int, body: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": f"batch_req_{line_id(row)}",
        "custom_id": asker.custom_id,
        "response": {"status_code": status, "request_id": f"req_{line_id(row)}", "body": body},
        "error": None,
    }


def _choice(
    index: int, chat: bool, sample: Mapping[str, Any], token_bytes: TokenBytes
) -> dict[str, Any]:
    logprobs = sample["logprobs"] or None
    shown = _chat_logprobs if chat else _completion_logprobs
    text = sample["text"]
    message = {"role": "assistant", "content": text, "refusal": None}
    return {
        "index": index,
        **({"message": message} if chat else {"text": text}),
        "logprobs": logprobs and shown(logprobs, token_bytes),
        "finish_reason": _FINISH_REASONS[sample["finish_reason"]],
    }


def _chat_logprobs(logprobs: Sequence[Any], token_bytes: TokenBytes) -> dict[str, Any]:
    content = [
        {
            **_chat_token(token, token_bytes),
            "top_logprobs": [_chat_token(one, token_bytes) for one in token["top"]],
        }
        for token in logprobs
    ]
    return {"content": content, "refusal": None}


def _chat_token(token: Mapping[str, Any], token_bytes: TokenBytes) -> dict[str, Any]:
    raw = token_bytes(token["token_id"])
    return {"token": _text(raw), "logprob": _logprob(token), "bytes": list(raw)}


def _completion_logprobs(logprobs: Sequence[Any], token_bytes: TokenBytes) -> dict[str, Any]:
    texts = [_text(token_bytes(token["token_id"])) for token in logprobs]
    starts = list(accumulate(map(len, texts), initial=0))[:-1]
    return {
        "tokens": texts,
        "token_logprobs": [_logprob(token) for token in logprobs],
        "top_logprobs": [_likeliest(token, token_bytes) for token in logprobs],
        "text_offset": starts,
    }


def _likeliest(token: Mapping[str, Any], token_bytes: TokenBytes) -> dict[str, float] | None:
    """The likeliest tokens with the chosen one, if any were asked for beside it."""
    shown = {_text(token_bytes(one["token_id"])): _logprob(one) for one in reversed(token["top"])}
    shown = dict(reversed(shown.items()))
    return {**shown, _text(token_bytes(token["token_id"])): _logprob(token)} if shown else None


def _logprob(token: Mapping[str, Any]) -> float:
    return _VERY_UNLIKELY if token["logprob"] is None else float(token["logprob"])


def _text(raw: bytes) -> str:
    """The text of a token; of one that is only a piece of a character, as OpenAI spells it."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
