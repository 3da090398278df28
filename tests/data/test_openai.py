"""OpenAI batch files: what a line asks for, what a line of the answer files says."""

import json
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from jobrunner.data.openai.requests import (
    CHAT_URL,
    COMPLETIONS_URL,
    Asker,
    BatchRequest,
    read_asker,
    read_request,
)
from jobrunner.data.openai.responses import encoded, error_line, line_id, response_line
from jobrunner.data.openai.token_bytes import TokenSpelling
from jobrunner.data.prompts.faults import RowFault
from jobrunner.records import RowId
from tests.tiny_tokenizers import byte_fallback, byte_level

HELLO = [{"role": "user", "content": "Hello"}]
ROW = RowId("batch.jsonl", 17)
CHAT, COMPLETION = Asker("a", chat=True), Asker("a", chat=False)


def chat(**body):
    return line(CHAT_URL, **{"messages": HELLO, **body})


def completion(**body):
    return line(COMPLETIONS_URL, **{"prompt": "Hello", **body})


def line(url, **body):
    return {"custom_id": "a", "method": "POST", "url": url, "body": {"model": "m", **body}}


def fault_of(record):
    with pytest.raises(RowFault) as caught:
        read_request(record)
    return caught.value.kind, str(caught.value)


# requests


def test_chat_request_is_its_messages():
    assert read_request(chat()) == BatchRequest("a", chat=True, prompt=HELLO)


def test_completion_is_its_prompt():
    assert read_request(completion()) == BatchRequest("a", chat=False, prompt="Hello")


@pytest.mark.parametrize("prompt", ["Hello", [5, 6], []])
def test_one_prompt_may_come_in_a_list(prompt):
    assert read_request(completion(prompt=[prompt])).prompt == prompt


def test_parameters_get_the_names_of_job_files():
    params = {
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 7,
        "stop": "end",
        "seed": 3,
        "n": 2,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "top_k": 4,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "min_tokens": 2,
        "stop_token_ids": [9],
        "ignore_eos": True,
    }
    expected = dict(params, max_new_tokens=7, min_new_tokens=2)
    del expected["max_tokens"], expected["min_tokens"]
    assert read_request(chat(**params)).params == expected


def test_null_leaves_a_parameter_to_the_job():
    assert read_request(chat(temperature=None, logit_bias=None, n=1)).params == {"n": 1}


def test_newer_name_of_max_tokens_is_read():
    assert read_request(chat(max_completion_tokens=5)).params == {"max_new_tokens": 5}


def test_two_lengths_are_refused():
    kind, _ = fault_of(chat(max_tokens=5, max_completion_tokens=6))
    assert kind == "bad_params"


def test_top_k_of_vllm_for_all_tokens_is_ours():
    assert read_request(chat(top_k=-1)).params == {"top_k": 0}


@pytest.mark.parametrize(
    "body",
    [
        {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "flex"},
        {"stream": False, "logit_bias": {}, "response_format": {"type": "text"}},
        {"parallel_tool_calls": False, "tools": [], "functions": [], "modalities": ["text"]},
        {"tool_choice": "none", "function_call": "none"},
    ],
)
def test_what_asks_for_nothing_is_accepted(body):
    assert read_request(chat(**body)) == BatchRequest("a", chat=True, prompt=HELLO)


@pytest.mark.parametrize(
    "body",
    [
        {"stream": True},
        {"logit_bias": {"5": 100}},
        {"response_format": {"type": "json_object"}},
        {"modalities": ["text", "audio"]},
        {"functions": [{"name": "f"}]},
        {"reasoning_effort": "high"},
        {"stream_options": {"include_usage": True}},
        {"prompt": "Hello"},
        {"best_of": 1},
        {"temprature": 0.5},
    ],
)
def test_what_would_change_the_answer_is_refused(body):
    (key,) = body
    expected = ("bad_params", f"asks for what cannot be done here: `{key}`")
    assert fault_of(chat(**body)) == expected


@pytest.mark.parametrize("body", [{"echo": True}, {"suffix": "end"}, {"messages": HELLO}])
def test_completion_refuses_what_would_change_it(body):
    assert fault_of(completion(**body))[0] == "bad_params"


def test_all_that_is_refused_is_named():
    _, words = fault_of(chat(stream=True, verbosity="low"))
    assert words == "asks for what cannot be done here: `stream`, `verbosity`"


def test_best_of_more_than_n_is_refused():
    assert fault_of(completion(n=2, best_of=3)) == (
        "bad_params",
        "asks for the best 2 of 3: `best_of` must be `n`",
    )


def test_best_of_n_is_n():
    assert read_request(completion(n=2, best_of=2)).params == {"n": 2}


@pytest.mark.parametrize("choice", ["required", {"type": "function"}])
def test_forced_tool_is_refused(choice):
    assert fault_of(chat(tools=[{"type": "function"}], tool_choice=choice))[0] == "bad_params"


def test_tools_are_handed_on():
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert read_request(chat(tools=tools)).tools == tools


def test_forbidden_tools_are_not_told():
    assert read_request(chat(tools=[{"type": "function"}], tool_choice="none")).tools is None


@pytest.mark.parametrize(
    ("body", "logprobs"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 3}, 3),
    ],
)
def test_chat_asks_for_log_probabilities(body, logprobs):
    assert read_request(chat(**body)).logprobs == logprobs


@pytest.mark.parametrize(("body", "logprobs"), [({}, None), ({"logprobs": 0}, 0)])
def test_completion_asks_for_log_probabilities(body, logprobs):
    assert read_request(completion(**body)).logprobs == logprobs


@pytest.mark.parametrize(
    "record",
    [
        chat(logprobs=3),
        chat(top_logprobs=3),
        chat(logprobs=True, top_logprobs=21),
        chat(logprobs=True, top_logprobs=-1),
        completion(logprobs=True),
        completion(logprobs=0.5),
    ],
)
def test_wrong_log_probabilities_are_refused(record):
    assert fault_of(record)[0] == "bad_params"


def test_parts_of_text_are_joined():
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    assert read_request(chat(messages=[{"role": "user", "content": parts}])).prompt == HELLO


def test_image_is_refused_as_multimodal():
    parts = [{"type": "text", "text": "what is this?"}, {"type": "image_url", "image_url": {}}]
    assert fault_of(chat(messages=[*HELLO, {"role": "user", "content": parts}])) == (
        "bad_type",
        "has in message 2 a part of type 'image_url': only text is read, nothing multimodal",
    )


def test_arguments_of_tool_calls_become_objects():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    (read,) = read_request(chat(messages=[message])).prompt
    assert read["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        (chat() | {"custom_id": None}, "bad_type"),
        (chat() | {"custom_id": 5}, "bad_type"),
        (chat() | {"method": "GET"}, "bad_params"),
        (chat() | {"method": None}, "bad_params"),
        (chat() | {"url": "/v1/embeddings"}, "bad_params"),
        (chat() | {"url": None}, "bad_params"),
        (chat() | {"body": None}, "bad_type"),
        (chat() | {"body": "text"}, "bad_type"),
        (chat(messages=None), "null_prompt"),
        (chat(messages="Hello"), "bad_type"),
        (chat(messages=["Hello"]), "bad_type"),
        (chat(messages=[{"content": "Hello"}]), "bad_type"),
        (chat(messages=[{"role": "user"}]), "bad_type"),
        (chat(messages=[{"role": "user", "content": [{"type": "text"}]}]), "bad_type"),
        (chat(messages=[{"role": "assistant", "tool_calls": [{}]}]), "bad_type"),
        (chat(tools={"type": "function"}), "bad_type"),
        (completion(prompt=None), "null_prompt"),
        (completion(prompt=5), "bad_type"),
        (completion(prompt=["a", 5]), "bad_type"),
        (completion(prompt=[True]), "bad_type"),
        (completion(prompt=["a", "b"]), "bad_params"),
        (completion(prompt=[[1], [2]]), "bad_params"),
        ({}, "bad_type"),
    ],
)
def test_wrong_line_is_an_error_row(record, kind):
    assert fault_of(record)[0] == kind


KEYS = "messages prompt tools tool_choice logprobs top_logprobs n best_of max_tokens top_k stop"
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 30) | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from("role content type text".split()), inner, max_size=3)
    ),
    max_leaves=6,
)
BODIES = st.dictionaries(st.sampled_from([*KEYS.split(), "odd"]), JSON, max_size=4)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    st.dictionaries(st.sampled_from(["custom_id", "method", "url", "body"]), JSON, max_size=4)
    | BODIES.map(lambda body: line(CHAT_URL) | {"body": body})
    | BODIES.map(lambda body: line(COMPLETIONS_URL) | {"body": body})
)
def test_any_line_is_a_request_or_a_fault(record):
    try:
        request = read_request(record)
    except RowFault:
        return
    assert read_asker(record) == Asker(request.custom_id, request.chat)


@pytest.mark.parametrize("record", [{}, {"custom_id": 5, "url": [], "body": None}])
def test_asker_of_a_wrong_line_has_what_is_there(record):
    assert read_asker(record) == Asker(None, chat=True)


# responses


def sample(text, *, reason="stop", tokens=2, logprobs=None):
    return {"text": text, "finish_reason": reason, "output_tokens": tokens, "logprobs": logprobs}


def outcome(*samples):
    tokens = sum(one["output_tokens"] for one in samples)
    return {"prompt_tokens": 5, "output_tokens": tokens, "samples": list(samples)}


def logprob(token_id, value, *top):
    likeliest = [{"token_id": one, "logprob": logprob} for one, logprob in top]
    return {"token_id": token_id, "logprob": value, "top": likeliest}


def respond(asker, *samples):
    return response_line(
        ROW,
        asker,
        outcome(*samples),
        model="demo",
        created_s=1_700_000_000,
        token_bytes={1: b"Hi", 2: b" you", 3: b"\xf0\x9f", 4: b""}.__getitem__,
    )


def test_line_of_a_chat_response():
    name = line_id(ROW)
    assert respond(CHAT, sample("Hi"), sample("Ho", reason="length", tokens=3)) == {
        "id": f"batch_req_{name}",
        "custom_id": "a",
        "response": {
            "status_code": 200,
            "request_id": f"req_{name}",
            "body": {
                "id": f"chatcmpl-{name}",
                "object": "chat.completion",
                "created": 1_700_000_000,
                "model": "demo",
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": "Hi", "refusal": None},
                        "logprobs": None,
                        "finish_reason": "stop",
                    },
                    {
                        "index": 1,
                        "message": {"role": "assistant", "content": "Ho", "refusal": None},
                        "logprobs": None,
                        "finish_reason": "length",
                    },
                ],
                "usage": {"prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10},
                "system_fingerprint": None,
            },
        },
        "error": None,
    }


def test_body_of_a_completion_response():
    assert respond(COMPLETION, sample("Hi", reason="repetition"))["response"]["body"] == {
        "id": f"cmpl-{line_id(ROW)}",
        "object": "text_completion",
        "created": 1_700_000_000,
        "model": "demo",
        "choices": [{"index": 0, "text": "Hi", "logprobs": None, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7},
        "system_fingerprint": None,
    }


def test_log_probabilities_of_a_chat_response():
    tokens = [logprob(1, -0.5, (1, -0.5), (3, None)), logprob(2, None)]
    (choice,) = respond(CHAT, sample("Hi you", logprobs=tokens))["response"]["body"]["choices"]
    hi = {"token": "Hi", "logprob": -0.5, "bytes": [72, 105]}
    piece = {"token": "bytes:\\xf0\\x9f", "logprob": -9999.0, "bytes": [240, 159]}
    you = {"token": " you", "logprob": -9999.0, "bytes": [32, 121, 111, 117]}
    assert choice["logprobs"] == {
        "content": [hi | {"top_logprobs": [hi, piece]}, you | {"top_logprobs": []}],
        "refusal": None,
    }


def test_log_probabilities_of_a_completion():
    tokens = [logprob(1, -2.0, (2, -0.5), (3, -1.0)), logprob(2, -0.1, (2, -0.1), (1, -3.0))]
    (choice,) = respond(COMPLETION, sample("Hi you", logprobs=tokens))["response"]["body"][
        "choices"
    ]
    assert choice["logprobs"] == {
        "tokens": ["Hi", " you"],
        "token_logprobs": [-2.0, -0.1],
        "top_logprobs": [
            {" you": -0.5, "bytes:\\xf0\\x9f": -1.0, "Hi": -2.0},
            {" you": -0.1, "Hi": -3.0},
        ],
        "text_offset": [0, 2],
    }


def test_completion_without_likeliest_tokens_has_none():
    tokens = [logprob(1, -2.0)]
    (choice,) = respond(COMPLETION, sample("Hi", logprobs=tokens))["response"]["body"]["choices"]
    assert choice["logprobs"]["top_logprobs"] == [None]


def test_likeliest_token_wins_a_shared_text():
    tokens = [logprob(1, -0.1, (1, -0.1), (4, -1.0), (4, -5.0))]
    (choice,) = respond(COMPLETION, sample("Hi", logprobs=tokens))["response"]["body"]["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"Hi": -0.1, "": -1.0}]


@pytest.mark.parametrize(
    ("kind", "status", "type_", "code"),
    [
        ("bad_params", 400, "invalid_request_error", "bad_params"),
        ("prompt_too_long", 400, "invalid_request_error", "context_length_exceeded"),
        ("internal", 500, "server_error", "internal"),
    ],
)
def test_line_of_an_error(kind, status, type_, code):
    made = error_line(ROW, Asker(None, chat=True), {"error_kind": kind, "error": "it is wrong"})
    error = {"message": "it is wrong", "type": type_, "param": None, "code": code}
    assert made == {
        "id": f"batch_req_{line_id(ROW)}",
        "custom_id": None,
        "response": {
            "status_code": status,
            "request_id": f"req_{line_id(ROW)}",
            "body": {"error": error},
        },
        "error": None,
    }


@given(st.text(), st.integers(0, 2**40), st.text(), st.integers(0, 2**40))
def test_rows_have_names_of_their_own(shard, index, other_shard, other_index):
    one, other = RowId(shard, index), RowId(other_shard, other_index)
    assert (line_id(one) == line_id(other)) == (one == other)


@given(st.text(st.characters(codec=None, categories=None)), st.floats(allow_nan=False))
def test_encoded_line_says_the_same(custom_id, number):
    said = {"custom_id": custom_id, "x": number if math.isfinite(number) else 0}
    raw = encoded(said)
    assert raw.endswith(b"\n")
    assert raw.count(b"\n") == 1
    assert json.loads(raw) == said


# what tokens stand for


@pytest.fixture(scope="module")
def byte_letters(tmp_path_factory):
    return AutoTokenizer.from_pretrained(byte_level(tmp_path_factory.mktemp("byte_level")))


@pytest.fixture(scope="module")
def byte_names(tmp_path_factory):
    return AutoTokenizer.from_pretrained(byte_fallback(tmp_path_factory.mktemp("byte_fallback")))


@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_tokens_of_letters_spell_the_text(byte_letters, text):
    ids = byte_letters(text, add_special_tokens=False).input_ids
    assert b"".join(map(TokenSpelling(byte_letters), ids)) == text.encode()


@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), min_size=1))
def test_tokens_of_words_and_bytes_spell_the_text(byte_names, text):
    ids = byte_names(text, add_special_tokens=False).input_ids
    assert b"".join(map(TokenSpelling(byte_names), ids)) == f" {text}".encode()


def test_special_token_is_its_name(byte_letters):
    assert TokenSpelling(byte_letters)(2) == b"<|im_end|>"


def test_unknown_token_is_nothing(byte_letters):
    assert TokenSpelling(byte_letters)(10**6) == b""
