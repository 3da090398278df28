"""Which chat templates are proven to do nothing with a prompt but print it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from jobrunner.data.prompts.frames import Frame, prove_frame
from tests.tiny_tokenizers import CHAT_TEMPLATE


def prove(template: str) -> Frame | None:
    return prove_frame(
        whole(template), turns, {"bos_token": "<s>"}, lambda text: render(template, text)
    )


def whole(template: str) -> str:
    return template.replace("PROMPT", "messages[0]['content']")


def turns(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def render(template: str, text: str) -> str:
    rendered, _ = render_jinja_template(
        [turns(text)], chat_template=whole(template), add_generation_prompt=True, bos_token="<s>"
    )
    only: str = rendered[0]
    return only


# PROMPT stands for the expression that gives the prompt
PROVEN = [
    CHAT_TEMPLATE,
    "{{ bos_token }}a{{ PROMPT }}b",
    "{{ 'a' + PROMPT + 'b' }}",
    "{% set c = PROMPT %}{{ c | trim }}!",
    "{% if PROMPT is string %}{{ PROMPT }}{% endif %}",
    "{% for m in messages %}{{ m.content | trim + '.' if m.role == 'user' }}{% endfor %}",
    "{% set n = namespace(c='') %}{% set n.c = PROMPT %}<{{ n.c }}>",
]
NOT_PROVEN = [
    "no prompt",
    "{{ PROMPT }}{{ PROMPT }}",
    "{{ PROMPT | upper }}",
    "{{ PROMPT | length }}{{ PROMPT }}",
    "{{ messages | tojson }}",
    "{{ messages[0] }}",
    "{{ PROMPT.strip() }}",
    "{{ PROMPT.text }}{{ PROMPT }}",
    "{{ PROMPT[0] }}",
    "{% if PROMPT %}{{ PROMPT }}{% endif %}",
    "{% if 'x' in PROMPT %}x{% endif %}{{ PROMPT }}",
    "{% if PROMPT in 'xyz' %}x{% endif %}{{ PROMPT }}",
    "{% if PROMPT == 'x' %}x{% endif %}{{ PROMPT }}",
    "{{ ('a' + PROMPT) | length }}{{ PROMPT }}",
    "{{ ('a' ~ PROMPT) | length }}{{ PROMPT }}",
    "{{ ('%s' % PROMPT) | upper }}",
    "{% set c %}{{ PROMPT }}{% endset %}{{ c | upper }}",
    "{% filter upper %}{{ PROMPT }}{% endfilter %}",
    "{% macro f(c) %}{{ c }}{% endmacro %}{{ f(PROMPT) | length }}{{ PROMPT }}",
    "{{ messages | map(attribute='content') | join }}",
    "{{ messages | selectattr('content') | list | length }}{{ PROMPT }}",
    "{{ {PROMPT: 1} | length }}{{ PROMPT }}",
    "{{ PROMPT }}{{ strftime_now('%S%f') }}",
    "{{ raise_exception('no') }}",
]


@pytest.mark.parametrize("template", PROVEN)
def test_harmless_template_is_proven(template: str) -> None:
    assert prove(template) is not None


@pytest.mark.parametrize("template", NOT_PROVEN)
def test_template_that_could_look_at_the_prompt_is_not_proven(template: str) -> None:
    assert prove(template) is None


@given(template=st.sampled_from(PROVEN), text=st.text(max_size=9))
def test_frame_is_what_rendering_gives(template: str, text: str) -> None:
    frame = prove(template)
    assert frame is not None
    assert frame.around(text) == render(template, text)
