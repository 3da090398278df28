"""Read the requests of OpenAI batch files. Knows nothing of tokens, models or files.

What a request leaves out is the job's to say. What it asks for and we cannot do makes it an
error: nothing that would change the answer is left out in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jobrunner.data.json_text import read_json_text
from jobrunner.data.prompts.faults import RowFault, shown

# the keys of a line
OPENAI_COLUMNS = ("custom_id", "method", "url", "body")
CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"

# parameters and what a job file calls them; those of the last two lines are vLLM's
_PARAMETERS = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    **{name: name for name in "temperature top_p stop seed n".split()},
    **{name: name for name in "presence_penalty frequency_penalty".split()},
    "min_tokens": "min_new_tokens",
    **{name: name for name in "top_k min_p repetition_penalty stop_token_ids ignore_eos".split()},
}
# they say nothing about the answer
_MEANINGLESS = frozenset(
    "model user metadata store service_tier safety_identifier prompt_cache_key"
    " prompt_cache_retention parallel_tool_calls".split()
)
# what else is read of a body
_CHAT_KEYS = frozenset("messages tools tool_choice logprobs top_logprobs".split())
_COMPLETION_KEYS = frozenset("prompt logprobs best_of".split())
# values that ask for nothing, of keys that would ask for what we do not have
_ASKS_FOR_NOTHING: dict[str, tuple[object, ...]] = {
    "stream": (False,),
    "echo": (False,),
    "suffix": ("",),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "functions": ([],),
    "function_call": ("none", "auto"),
}
_MOST_TOP_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One request of a batch file.

    `prompt` is a list of messages for the chat template if `chat`, else the text of a prompt or
    its token ids. `params` has the job file's names. `logprobs` is as in `Sampling`.
    """

    custom_id: str
    chat: bool
    prompt: list[Any] | str
    tools: list[Any] | None = None
    params: Mapping[str, object] = field(default_factory=dict)
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Asker:
    """What a line, even a wrong one, says of where its answer goes."""

    custom_id: str | None
    chat: bool


def read_request(record: Mapping[str, object]) -> BatchRequest:
    """Read what a line asks for; `record` has its keys. Raises RowFault."""
    custom_id, body = record.get("custom_id"), record.get("body")
    if not isinstance(custom_id, str):
        raise RowFault("bad_type", f"has a custom_id of type {type(custom_id).__name__}, not text")
    chat = _is_chat(record)
    if not isinstance(body, Mapping):
        raise RowFault("bad_type", f"has a body of type {type(body).__name__}, not an object")
    # null is OpenAI's word for the default
    asked = {key: value for key, value in body.items() if value is not None}
    _refuse_what_we_cannot(asked, _CHAT_KEYS if chat else _COMPLETION_KEYS)
    return BatchRequest(
        custom_id,
        chat,
        _messages(asked) if chat else _prompt(asked),
        _tools(asked),
        _parameters(asked),
        _chat_logprobs(asked) if chat else _completion_logprobs(asked),
    )


def read_asker(record: Mapping[str, object]) -> Asker:
    """Read what an answer needs of the line that it is for, as far as it is there."""
    custom_id = record.get("custom_id")
    return Asker(
        custom_id if isinstance(custom_id, str) else None, record.get("url") != COMPLETIONS_URL
    )


def _is_chat(record: Mapping[str, object]) -> bool:
    if record.get("method") != "POST":
        raise RowFault("bad_params", f"has the method {shown(record.get('method'))}, not POST")
    url = record.get("url")
    if url not in (CHAT_URL, COMPLETIONS_URL):
        raise RowFault(
            "bad_params", f"has the url {shown(url)}, not {CHAT_URL} or {COMPLETIONS_URL}"
        )
    return url == CHAT_URL


def _refuse_what_we_cannot(asked: Mapping[str, object], read: frozenset[str]) -> None:
    known = _PARAMETERS.keys() | _MEANINGLESS | read
    refused = [
        f"`{key}`"
        for key, value in asked.items()
        if key not in known and value not in _ASKS_FOR_NOTHING.get(key, ())
    ]
    if refused:
        raise RowFault("bad_params", f"asks for what cannot be done here: {', '.join(refused)}")
    number = asked.get("n", 1)
    if asked.get("best_of", number) != number:
        raise RowFault(
            "bad_params",
            f"asks for the best {shown(number)} of {shown(asked['best_of'])}:"
            " `best_of` must be `n`",
        )


def _messages(asked: Mapping[str, Any]) -> list[Any]:
    messages = asked.get("messages")
    if messages is None:
        raise RowFault("null_prompt", "has no messages")
    if not isinstance(messages, list):
        raise RowFault("bad_type", f"has messages of type {type(messages).__name__}, not a list")
    return [_message(message, number) for number, message in enumerate(messages, start=1)]


def _message(message: object, number: int) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RowFault("bad_type", f"has as message {number} no object with a role")
    whole = dict(message)
    calls = message.get("tool_calls")
    if calls:
        whole["tool_calls"] = _tool_calls(calls, number)
    if message.get("content") is not None or not calls:
        whole["content"] = _content(message.get("content"), number)
    return whole


def _content(content: object, number: int) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowFault(
            "bad_type",
            f"has in message {number} a content of type {type(content).__name__}, not text",
        )
    return "".join(_part_text(part, number) for part in content)


def _part_text(part: object, number: int) -> str:
    """The text of one part of a content; parts are joined as they are."""
    fields = part if isinstance(part, Mapping) else {}
    kind = fields.get("type")
    if kind not in ("text", "refusal"):
        raise RowFault(
            "bad_type",
            f"has in message {number} a part of type {shown(kind)}:"
            " only text is read, nothing multimodal",
        )
    text = fields.get(kind)
    if not isinstance(text, str):
        raise RowFault("bad_type", f"has in message {number} a part without text")
    return text


def _tool_calls(calls: object, number: int) -> list[Any]:
    """Calls with their arguments as objects: chat templates write them as JSON themselves."""
    try:
        return [
            {**call, "function": {**call["function"], "arguments": _arguments(call["function"])}}
            for call in calls  # type: ignore[attr-defined]
        ]
    except (TypeError, KeyError, ValueError) as error:
        raise RowFault(
            "bad_type", f"has in message {number} a tool call that cannot be read: {error!r}"
        ) from error


def _arguments(function: Mapping[str, Any]) -> Any:
    arguments = function["arguments"]
    return read_json_text(arguments or "{}") if isinstance(arguments, str) else arguments


def _prompt(asked: Mapping[str, Any]) -> str | list[Any]:
    prompt = asked.get("prompt")
    if prompt is None:
        raise RowFault("null_prompt", "has no prompt")
    if isinstance(prompt, list) and prompt and all(isinstance(one, str | list) for one in prompt):
        if len(prompt) > 1:
            raise RowFault(
                "bad_params", f"has {len(prompt):,} prompts: each needs a request of its own"
            )
        prompt = prompt[0]
    if isinstance(prompt, str) or (isinstance(prompt, list) and all(map(_is_whole, prompt))):
        return prompt
    raise RowFault("bad_type", "has a prompt that is neither text nor token ids")


def _tools(asked: Mapping[str, Any]) -> list[Any] | None:
    tools, choice = asked.get("tools", []), asked.get("tool_choice", "auto")
    if not isinstance(tools, list):
        raise RowFault("bad_type", f"has tools of type {type(tools).__name__}, not a list")
    if choice not in ("auto", "none"):
        raise RowFault("bad_params", f"has the tool_choice {shown(choice)}, not auto or none")
    # the model calls no tool that it is not told of
    return tools if tools and choice == "auto" else None


def _parameters(asked: Mapping[str, Any]) -> dict[str, object]:
    most = [asked[key] for key in ("max_tokens", "max_completion_tokens") if key in asked]
    if most and most[0] != most[-1]:
        raise RowFault("bad_params", "has a max_tokens and another max_completion_tokens")
    params = {ours: asked[theirs] for theirs, ours in _PARAMETERS.items() if theirs in asked}
    if params.get("top_k") == -1:
        # vLLM's word for all
        params["top_k"] = 0
    return params


def _chat_logprobs(asked: Mapping[str, Any]) -> int | None:
    wanted, top = asked.get("logprobs", False), asked.get("top_logprobs", 0)
    if not isinstance(wanted, bool):
        raise RowFault("bad_params", f"has the logprobs {shown(wanted)}, not true or false")
    if top and not wanted:
        raise RowFault("bad_params", "has top_logprobs without logprobs")
    return _top(top, "top_logprobs") if wanted else None


def _completion_logprobs(asked: Mapping[str, Any]) -> int | None:
    return _top(asked["logprobs"], "logprobs") if "logprobs" in asked else None


def _top(value: object, name: str) -> int:
    if not isinstance(value, int) or not _is_whole(value) or not 0 <= value <= _MOST_TOP_LOGPROBS:
        raise RowFault(
            "bad_params",
            f"has the {name} {shown(value)}, not a whole number from 0 to {_MOST_TOP_LOGPROBS}",
        )
    return value


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
