"""The chat template of a model or of the job: messages to text. Knows nothing of rows or tokens."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jobrunner.config import NEEDS_CHAT, InputTable
from jobrunner.data.prompts.faults import RowFault, reason
from jobrunner.data.prompts.frames import Frame, prove_frame
from jobrunner.errors import ConfigError

log = logging.getLogger("cbjob")

Messages = list[dict[str, Any]]


class Chat:
    """Renders conversations as transformers does. `own` is a template in place of the model's.

    Raises ConfigError where a template or an argument of it cannot be used.
    """

    def __init__(
        self, tokenizer: Any, own: str | None, arguments: Mapping[str, Any], system: str | None
    ) -> None:
        self._tokenizer = tokenizer
        self._own = own
        self._arguments = dict(arguments)
        self._system = system
        self._check_arguments()
        self._check_template()
        self._frame = self._prove()

    @property
    def tells_the_time(self) -> bool:
        """Whether a prompt may depend on the day on which it is made."""
        return "strftime_now" in self._source

    @property
    def digest(self) -> str:
        """What changes with the template."""
        content = self._source
        return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()

    @property
    def _source(self) -> str:
        template = self._own if self._own is not None else self._tokenizer.chat_template
        return json.dumps(template, sort_keys=True)

    def messages(self, content: str | Messages) -> Messages:
        """The whole conversation: a prompt as the user's message, the job's system message."""
        turns = [{"role": "user", "content": content}] if isinstance(content, str) else content
        if self._system is None or turns[0]["role"] == "system":
            return turns
        return [{"role": "system", "content": self._system}, *turns]

    def render(
        self, messages: Messages, tools: Sequence[Any] | None = None, *, goes_on: bool = False
    ) -> str:
        """The text of a conversation up to the answer, or to the last message that goes on.

        Raises RowFault where the template does not take the conversation.
        """
        try:
            return self._apply(messages, tools, goes_on=goes_on)
        except Exception as error:  # a template is a program, it raises anything
            words = f"makes the chat template fail: {reason(error)}"
            raise RowFault("template_error", words) from error

    def render_prompt(self, prompt: str) -> str:
        """The text of a conversation of one user's message, and fast where that is proven safe."""
        if self._frame is not None:
            return self._frame.around(prompt)
        return self.render(self.messages(prompt))

    def _apply(
        self, messages: Messages, tools: Sequence[Any] | None = None, *, goes_on: bool = False
    ) -> str:
        text: str = self._tokenizer.apply_chat_template(
            messages,
            tools=tools,
            chat_template=self._own,
            tokenize=False,
            add_generation_prompt=not goes_on,
            continue_final_message=goes_on,
            **self._arguments,
        )
        return text

    def _check_arguments(self) -> None:
        parameters = inspect.signature(self._tokenizer.apply_chat_template).parameters
        taken = {*parameters, "messages"} - {"documents", "kwargs"}
        if wrong := sorted(taken & self._arguments.keys()):
            raise ConfigError(
                f"`input.chat_template_kwargs` cannot set `{wrong[0]}`",
                hint="it is for the variables that the template itself names",
            )

    def _check_template(self) -> None:
        from jinja2 import TemplateSyntaxError

        try:
            self._apply(self.messages("x"))
        except TemplateSyntaxError as error:
            whose = "`input.chat_template`" if self._own else "the model's chat template"
            raise ConfigError(
                f"{whose} is not a template: {error.message} in its line {error.lineno}"
            ) from error
        except Exception as error:  # noqa: BLE001 - it may want other messages: rows will say
            log.debug("the chat template takes no single prompt: %s", error)

    def _prove(self) -> Frame | None:
        template = self._own
        if template is None:
            template = self._tokenizer.get_chat_template()
        variables = {**self._tokenizer.special_tokens_map, **self._arguments}

        def render(prompt: str) -> str:
            return self._apply(self.messages(prompt))

        def messages(hole: Any) -> Messages:
            return self.messages([{"role": "user", "content": hole}])

        return prove_frame(template, messages, variables, render)


def open_chat(
    tokenizer: Any, table: InputTable, folder: Path, base: Path, system: str | None
) -> Chat | None:
    """The chat template that a job uses, None if it uses none.

    `base` is the job file's folder, `system` the text of the job's system message.

    Raises ConfigError where there is none and something asks for one.
    """
    own = None if table.chat_template is None else _read(table.chat_template, base)
    has_template = own is not None or _has_template(tokenizer)
    wanted = next((key for key in NEEDS_CHAT if getattr(table, key)), None)
    if table.messages is not None:
        wanted = "messages"
    if not has_template and (table.chat is True or table.messages is not None):
        asks = "input.messages" if table.messages is not None else "input.chat = true"
        raise ConfigError(
            f"`{asks}` needs a chat template, and the model in `{folder}` has none",
            hint="use a model tuned for chat, name a template in `input.chat_template`,"
            " or use raw prompts with `input.prompt`",
        )
    # token ids are used as they are
    chat = table.token_ids is None and (has_template if table.chat == "auto" else table.chat)
    if not chat and wanted is not None:
        raise ConfigError(
            f"`input.{wanted}` needs a chat template, and none is used",
            hint="use a model tuned for chat, or put the words into the prompts",
        )
    return Chat(tokenizer, own, table.chat_template_kwargs, system) if chat else None


def _read(name: str, base: Path) -> str:
    path = base / os.path.expanduser(name)
    if not path.is_file():
        raise ConfigError(
            f"`input.chat_template` is no file: `{path}`",
            hint="name a file with the template, relative to the job file",
        )
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read `input.chat_template` `{path}`: {error}") from error


def _has_template(tokenizer: Any) -> bool:
    if not tokenizer.chat_template:
        return False
    try:
        tokenizer.get_chat_template()
    except ValueError as error:
        raise ConfigError(f"the model's chat template cannot be used: {error}") from error
    return True
