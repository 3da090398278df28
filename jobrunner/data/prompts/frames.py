"""Prove that a chat template does nothing with a prompt but print it. Knows nothing of rows.

A template that passes is a text with a hole: filling it costs nothing beside rendering. The
proof renders it once with a hole in place of the prompt: a value that can be printed, trimmed
and joined to text, and refuses everything else, so that no decision can depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

# what tells environments apart: each is rendered by transformers, too
_SAMPLES = ("", " x \n", "Hello", "</think> <b>&amp;\\n\"'{{ x }}", "é😀\t")
_PLACE = "\ue000{}\ue001"


@dataclass(frozen=True, slots=True)
class Frame:
    """What a chat template writes before and after a prompt, `trimmed` or as it is."""

    before: str
    after: str
    trimmed: bool

    def around(self, prompt: str) -> str:
        return self.before + (prompt.strip() if self.trimmed else prompt) + self.after


class NotProvenError(Exception):
    """The template does something with the prompt that is not known to be harmless."""


class Hole:
    """A prompt that nobody can look at: the sandbox shows no name with an underscore."""

    def __init__(self, *, trimmed: bool = False) -> None:
        self._text = _PLACE.format("trimmed" if trimmed else "plain")

    def __add__(self, other: object) -> Printed:
        return Printed([self, other])

    def __radd__(self, other: object) -> Printed:
        return Printed([other, self])

    def _refuse(self, *_: object) -> NoReturn:
        raise NotProvenError

    __bool__ = __len__ = __iter__ = __contains__ = __eq__ = __ne__ = __hash__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __getitem__ = __str__ = __repr__ = __format__ = _refuse
    __mul__ = __rmul__ = __mod__ = __rmod__ = __html__ = _refuse


class Printed(Hole):
    """Text joined with a hole, as secret as the hole itself."""

    def __init__(self, parts: list[object]) -> None:
        super().__init__()
        self._text = "".join(_written(part) for part in parts)


def prove_frame(
    template: str,
    messages: Callable[[Hole], list[dict[str, Any]]],
    variables: Mapping[str, object],
    render: Callable[[str], str],
) -> Frame | None:
    """The frame of a chat template, None where the proof fails.

    `messages` makes the conversation around a prompt, `render` renders it as transformers does.
    """
    try:
        text = (
            _environment(template)
            .from_string(template)
            .render(
                messages=messages(Hole()),
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **variables,
            )
        )
        frame = _frame(text)
        proven = all(frame.around(sample) == render(sample) for sample in _SAMPLES)
    except Exception:  # noqa: BLE001 - whatever goes wrong, it is not proven
        return None
    return frame if proven else None


def _frame(text: str) -> Frame:
    found = [
        Frame(before, after, trimmed)
        for trimmed in (False, True)
        for before, place, after in [text.partition(_written(Hole(trimmed=trimmed)))]
        if place and "\ue000" not in before + after
    ]
    if len(found) != 1:
        raise NotProvenError
    return found[0]


def _environment(template: str) -> Any:
    from jinja2 import TemplateError, nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Environment(ImmutableSandboxedEnvironment):
        def call(self, context: Any, called: Any, /, *args: Any, **named: Any) -> Any:
            # so does a macro
            return _not_looked_into(super().call(context, called, *args, **named))

    environment = Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_written,
        extensions=["jinja2.ext.loopcontrols"],
    )
    # these blocks turn what they print into a value that can be looked at
    tree = environment.parse(template)
    if any(tree.find_all((nodes.AssignBlock, nodes.FilterBlock, nodes.CallBlock))):
        raise NotProvenError

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    environment.globals["raise_exception"] = raise_exception
    environment.globals.pop("lipsum")
    environment.filters = {name: _blind(name, f) for name, f in environment.filters.items()}
    environment.tests = {name: _blind_test(name, f) for name, f in environment.tests.items()}
    return environment


def _written(value: object) -> Any:
    return value._text if isinstance(value, Hole) else value


def _not_looked_into(value: Any) -> Any:
    if isinstance(value, str) and "\ue000" in value:
        raise NotProvenError
    return value


def _blind(name: str, function: Any) -> Any:
    """A filter that refuses a hole, but for trimming it; `tojson` differs in transformers."""

    def filter_(*values: Any, **named: Any) -> Any:
        if name == "trim" and type(values[0]) is Hole and len(values) == 1 and not named:
            return Hole(trimmed=True)
        if name in ("tojson", "random") or any(isinstance(value, Hole) for value in values):
            raise NotProvenError
        return _not_looked_into(function(*values, **named))

    return _like(filter_, function)


def _blind_test(name: str, function: Any) -> Any:
    """A test whose answer is the same for every text."""
    about_all_texts = {"string": True, "defined": True, "iterable": True, "sequence": True} | {
        "mapping": False,
        "none": False,
        "undefined": False,
        "number": False,
        "boolean": False,
    }

    def test(*values: Any) -> Any:
        if any(isinstance(value, Hole) for value in values):
            if name in about_all_texts and len(values) == 1:
                return about_all_texts[name]
            raise NotProvenError
        return function(*values)

    return _like(test, function)


def _like(wrapper: Any, function: Any) -> Any:
    """Keep what jinja2 notes on functions that want the environment or the context."""
    wrapper.__dict__.update(getattr(function, "__dict__", {}))
    return wrapper
