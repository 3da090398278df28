"""What a row brings for its prompt, checked and rendered to text. Knows nothing of tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jobrunner.config import InputTable
from jobrunner.data.json_text import read_json_text
from jobrunner.data.openai.requests import BatchRequest
from jobrunner.data.prompts.chat import Chat
from jobrunner.data.prompts.faults import RowFault, shown
from jobrunner.data.prompts.nested import Path, at, strings, text_paths, without_nulls
from jobrunner.data.prompts.templates import ColumnTemplate
from jobrunner.records import Row


@dataclass(frozen=True, slots=True)
class Material:
    """What users wrote of one prompt, before any template.

    `content` is the text of a prompt, a list of messages, a mapping of columns for the job's
    template, or token ids. A `raw` one goes past the chat template. `columns` are for the prefill.
    """

    content: Any
    raw: bool
    tools: list[Any] | None = None
    columns: dict[str, object] = field(default_factory=dict)

    @property
    def is_ids(self) -> bool:
        return isinstance(self.content, list) and isinstance(self.content[0], int)


class Rendered(NamedTuple):
    """A text to tokenise; the tokenizer adds its BOS to a `whole` one."""

    text: str
    whole: bool


class Materials:
    """Takes the material of prompts from rows, and renders it through the templates of a job."""

    def __init__(self, table: InputTable, chat: Chat | None, vocabulary: int) -> None:
        self._table = table
        self._chat = chat
        self._vocabulary = vocabulary
        self._template = _template("template", table.template)
        self._prefill = _template("prefill", table.prefill)

    def take(self, row: Row) -> Material:
        """Take and check what a row brings. Raises RowFault."""
        if self._template is not None:
            content: Any = self._columns(row, self._template)
        else:
            content = self._checked(row.value)
        tools = None if self._table.tools is None else _tools(self._table.tools, row)
        columns = {} if self._prefill is None else self._columns(row, self._prefill)
        return Material(content, self._chat is None, tools, columns)

    def take_asked(self, asked: BatchRequest) -> Material:
        """Take and check what a request of an OpenAI batch file brings. Raises RowFault."""
        if not asked.chat:
            if isinstance(asked.prompt, str):
                return Material(asked.prompt, raw=True)
            return Material(self._checked_ids(asked.prompt), raw=True)
        if self._chat is None:
            raise RowFault("template_error", "has messages, and no chat template is used")
        return Material(_checked_messages(asked.prompt), raw=False, tools=asked.tools)

    def render(self, material: Material) -> Rendered:
        """Render through the job's template, the chat template and the prefill. Raises RowFault."""
        content = material.content
        if self._template is not None:
            content = self._template.render(content)
        if material.raw:
            return Rendered(content, whole=True)
        assert self._chat is not None
        if content == "":
            raise RowFault("empty_prompt", "is empty")
        if isinstance(content, str) and material.tools is None:
            text = self._chat.render_prompt(content)
        else:
            messages = self._chat.messages(content)
            goes_on = self._prefill is None and messages[-1]["role"] == "assistant"
            text = self._chat.render(messages, material.tools, goes_on=goes_on)
        if self._prefill is not None:
            text += self._prefill.render(material.columns)
        return Rendered(text, whole=False)

    def cuttable(self, material: Material) -> list[Path]:
        """Where the texts stand in the content that may be cut, the longest first."""
        content = material.content
        paths = list(text_paths(content))
        if isinstance(content, list):
            paths = [path for path in paths if path[1] == "content" and path[-1] in _TEXT_KEYS]
        return sorted(paths, key=lambda path: -len(at(content, path)))

    def _columns(self, row: Row, template: ColumnTemplate) -> dict[str, object]:
        columns = {name: row.others[name] for name in template.columns}
        for name, value in columns.items():
            if isinstance(value, bytes):
                raise _bytes_fault(value, f"has in column `{name}` what ")
        return columns

    def _checked(self, value: object) -> object:
        if value is None:
            raise RowFault("null_prompt", "is null")
        if isinstance(value, bytes):
            raise _bytes_fault(value)
        if self._table.messages is not None:
            return _checked_messages(value)
        if self._table.token_ids is not None:
            return self._checked_ids(value)
        return _checked_text(value, empty_allowed=self._chat is None)

    def _checked_ids(self, value: object) -> list[int]:
        if not isinstance(value, list):
            raise RowFault(
                "bad_type", f"is of type {type(value).__name__}, not a list of token ids"
            )
        if not value:
            raise RowFault("empty_prompt", "has no token ids")
        for place, token in enumerate(value):
            if type(token) is not int or not 0 <= token < self._vocabulary:
                raise RowFault(
                    "bad_type",
                    f"has {shown(token)} at place {place:,}, which is no token id:"
                    f" these are whole numbers from 0 to {self._vocabulary - 1:,}",
                )
        return value


# keys of a message, and of the parts of its content, that hold what users wrote
_TEXT_KEYS = ("content", "text")


def surrogate_fault(material: Material) -> RowFault | None:
    """Say where a material has what is no Unicode text, if it has."""
    for text in strings([material.content, material.tools, material.columns]):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            return RowFault("bad_text", f"has a lone surrogate at character {error.start:,}")
    return None


def _template(key: str, source: str | None) -> ColumnTemplate | None:
    return None if source is None else ColumnTemplate(key, source)


def _checked_text(value: object, *, empty_allowed: bool) -> str:
    if not isinstance(value, str):
        raise RowFault("bad_type", f"is of type {type(value).__name__}, not text")
    if value == "" and not empty_allowed:
        raise RowFault("empty_prompt", "is empty")
    return value


def _checked_messages(value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise RowFault("bad_type", f"is of type {type(value).__name__}, not a list of messages")
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict):
            kind = type(message).__name__
            raise RowFault("bad_type", f"has as message {number} a {kind}, not a role and content")
        if not isinstance(message.get("role"), str):
            raise RowFault("bad_type", f"has no role in message {number}")
    if not value:
        raise RowFault("empty_prompt", "has no messages")
    return [without_nulls(message) for message in value]


def _tools(column: str, row: Row) -> list[Any] | None:
    value = row.others[column]
    if isinstance(value, str):
        try:
            value = read_json_text(value)
        except ValueError as error:
            raise RowFault("bad_type", f"has in column `{column}` no JSON: {error}") from error
    else:
        value = without_nulls(value)
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise RowFault("bad_type", f"has in column `{column}` {shown(value)}, no list of tools")
    return value


def _bytes_fault(value: bytes, where: str = "") -> RowFault:
    try:
        value.decode()
    except UnicodeDecodeError as error:
        words = f"{where}is not UTF-8: {error.reason} at byte {error.start:,}"
        return RowFault("bad_text", words)
    return RowFault("bad_type", f"{where}is bytes, not text")
