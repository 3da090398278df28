"""Real tiny models: our tokens equal those of transformers `generate`, whatever the batch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    GPT2Config,
    GptOssConfig,
    MistralConfig,
    Qwen3Config,
)

from jobrunner.config import BatchingTable
from jobrunner.engine import loading
from jobrunner.engine.loading import LoadedEngine, open_engine
from jobrunner.engine.runner import TransformersRunner
from jobrunner.errors import InfrastructureError
from jobrunner.records import Completion, Request, RowId, Sampling, Step, TextStream
from tests.fakes import FakeRequests, LetterText
from tests.tiny import VOCABULARY, save_model, tiny_llama

NEW_TOKENS = 16


def letters() -> TextStream:
    return LetterText(lambda token: chr(ord("0") + token))


def open_tiny(folder: Path, **settings) -> LoadedEngine:
    defaults = {
        "device": "cpu",
        "block_size": 4,
        "kv_memory": 2**20,
        "max_batch_size": 6,
        "token_budget": 20,
    }
    return open_engine(folder, open_text=letters, dtype="float32", **{**defaults, **settings})


def serve(folder: Path, requests: Sequence[Request], **settings) -> tuple[list[Step], dict]:
    steps: list[Step] = []
    done: dict[int, Completion] = {}
    # one more becomes ready each step, so that prompts meet decodes
    for step in open_tiny(folder, **settings).engine.run(FakeRequests(requests, [3] + [1] * 999)):
        steps.append(step)
        done.update({completion.id.index: completion for completion in step.completions})
    return steps, done


def generate(
    folder: Path, prompts: Sequence[Sequence[int]], count: int = NEW_TOKENS, **options
) -> list:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        whole = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            **{"eos_token_id": None, **options},
        )
        outputs.append(whole[0, len(prompt) :].tolist())
    return outputs


def random_prompts(count: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    """Ragged prompts; every third begins like the first, so that prefixes are shared."""
    numbers = random.Random(seed)
    prompts = [
        [numbers.randrange(VOCABULARY) for _ in range(numbers.randint(1, longest))]
        for _ in range(count)
    ]
    shared = [numbers.randrange(VOCABULARY) for _ in range(13)]
    return [
        shared + prompt[:9] if index % 3 == 0 else prompt for index, prompt in enumerate(prompts)
    ]


def greedy(index: int, prompt: Sequence[int], output: Sequence[int] = ()) -> Request:
    return Request(RowId("s", index), prompt, Sampling(NEW_TOKENS), output)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("attention", ["auto", "reference"])
def test_mixed_batches_with_chunks_prefix_hits_preemptions_and_resumes_equal_generate(
    name: str, preemption: str, attention: str, request: pytest.FixtureRequest
):
    folder: Path = request.getfixturevalue(name)
    prompts = random_prompts(18)
    expected = generate(folder, prompts)
    assert len({tuple(output) for output in expected}) > 12, "the texts hardly differ"
    requests = [
        greedy(index, prompt, expected[index][: index if index % 4 == 1 else 0])
        for index, prompt in enumerate(prompts)
    ]
    block_bytes = 4 * open_tiny(folder).kv_bytes_per_token
    steps, done = serve(
        folder,
        requests,
        chunk_size=7,
        kv_memory=36 * block_bytes,
        scheduling=BatchingTable(preemption=preemption),
        ahead=False,
        attention=attention,
    )
    assert [done[index].tokens for index in range(18)] == expected
    assert sum(step.preemptions for step in steps) > 0
    assert sum(step.tokens_cached for step in steps) > 0
    recomputed, swapped = (
        sum(step.tokens_recomputed for step in steps),
        sum(step.swapped_blocks for step in steps),
    )
    assert (recomputed > 0, swapped > 0) == (preemption == "recompute", preemption == "swap")
    assert (sum(step.swap_s for step in steps) > 0) == (preemption == "swap")
    assert any(step.prefill_tokens and step.decode_tokens for step in steps)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is present")
def test_on_a_gpu_the_tokens_equal_those_of_the_cpu(llama: Path):
    prompts = random_prompts(18)
    requests = [greedy(*row) for row in enumerate(prompts)]
    _, done = serve(llama, requests, device="cuda", chunk_size=7)
    assert [done[index].tokens for index in range(18)] == generate(llama, prompts)


@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
@pytest.mark.parametrize("attention", ["auto", "torch", "reference"])
def test_the_block_size_changes_no_token(llama: Path, block_size: int, attention: str):
    prompts = [[5] * length for length in (15, 16, 17)] + random_prompts(3, seed=1)
    rows = [greedy(*row) for row in enumerate(prompts)]
    _, done = serve(llama, rows, block_size=block_size, attention=attention)
    assert [done[index].tokens for index in range(6)] == generate(llama, prompts)


@pytest.mark.parametrize(
    "config",
    [
        MistralConfig(sliding_window=9),
        Gemma2Config(
            head_dim=8, sliding_window=9, query_pre_attn_scalar=8, attn_logit_softcapping=5.0
        ),
        GptOssConfig(head_dim=8, sliding_window=9, num_local_experts=4, num_experts_per_tok=2),
        Qwen3Config(head_dim=8),
        GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=128),
    ],
    ids=lambda config: config.model_type,
)
def test_windows_soft_caps_sinks_and_learned_positions_equal_generate(tmp_path: Path, config):
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.4,
    }
    own = config.to_diff_dict()
    if config.model_type != "gpt2":
        own = {**own, **shape}
    own |= {"vocab_size": VOCABULARY, "initializer_range": 0.4}
    own |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    own.pop("layer_types", None)
    folder = save_model(tmp_path, type(config)(**own))
    prompts = random_prompts(5, seed=2)
    expected = generate(folder, prompts)
    for attention in ("auto", "torch", "reference"):
        rows = [greedy(*row) for row in enumerate(prompts)]
        _, done = serve(folder, rows, chunk_size=6, attention=attention)
        assert [done[index].tokens for index in range(5)] == expected


def sampled(index: int, prompt: Sequence[int], output: Sequence[int] = ()) -> Request:
    sampling = Sampling(
        NEW_TOKENS,
        temperature=0.8 + index % 3,
        top_p=0.9 if index % 2 else 1.0,
        draw_key=b"seed" + bytes([index]),
    )
    return Request(RowId("s", index), prompt, sampling, output)


def test_sampled_rows_do_not_depend_on_batch_order_or_resume(llama: Path):
    prompts = random_prompts(9, seed=3)
    rows = [
        greedy(index, prompt) if index % 4 == 3 else sampled(index, prompt)
        for index, prompt in enumerate(prompts)
    ]
    _, together = serve(llama, rows)
    _, turned = serve(llama, rows[::-1], chunk_size=5, prefix_cache=False)
    _, alone = serve(llama, rows, max_batch_size=1)
    _, resumed = serve(
        llama,
        [
            Request(row.id, row.prompt, row.sampling, together[index].tokens[: 2 * index])
            for index, row in enumerate(rows)
        ],
    )
    tokens = [together[index].tokens for index in range(9)]
    for other in (turned, alone, resumed):
        assert [other[index].tokens for index in range(9)] == tokens


MIXED = [
    Sampling(NEW_TOKENS),
    Sampling(NEW_TOKENS, temperature=1.5, top_k=5, draw_key=b"a"),
    Sampling(NEW_TOKENS, repetition_penalty=1.4, presence_penalty=0.5),
    Sampling(NEW_TOKENS, temperature=1.2, draw_key=b"b"),
    Sampling(NEW_TOKENS, temperature=1.0, frequency_penalty=1.0, min_p=0.05, draw_key=b"c"),
    Sampling(NEW_TOKENS, stop=("a", "b", "0", "1", "2", "Q", "R", "S", "d", "Y")),
    Sampling(NEW_TOKENS, min_new_tokens=6, stop_ids=frozenset(range(0, VOCABULARY, 3))),
    Sampling(NEW_TOKENS, temperature=0.9, top_p=0.8, logprobs=3, draw_key=b"d"),
    Sampling(NEW_TOKENS),
]


def test_case_P_rows_of_all_kinds_do_not_depend_on_their_batch(llama: Path):
    prompts = random_prompts(len(MIXED), seed=8)
    rows = [
        Request(RowId("s", index), prompt, sampling)
        for index, (prompt, sampling) in enumerate(zip(prompts, MIXED, strict=True))
    ]
    _, first = serve(llama, rows)
    expected = [(done.tokens, done.finish_reason) for _, done in sorted(first.items())]
    plain = generate(llama, prompts)
    assert [expected[index][0] for index in (0, 8)] == [plain[0], plain[8]]
    assert all(expected[index][0] != plain[index] for index in range(1, 8))
    shuffled = random.Random(0).sample(rows, len(rows))
    for order, size in ((rows, 1), (rows[::-1], 2), (shuffled, 4)):
        _, done = serve(llama, order, max_batch_size=size)
        got = [(done[index].tokens, done[index].finish_reason) for index in range(len(rows))]
        assert got == expected
    for row in rows:
        _, alone = serve(llama, [row])
        assert alone[row.id.index].tokens == expected[row.id.index][0]


@pytest.mark.parametrize("penalty", [0.8, 1.3])
def test_a_repetition_penalty_equals_generate(llama: Path, penalty: float):
    prompts = random_prompts(6, seed=9)
    sampling = Sampling(NEW_TOKENS, repetition_penalty=penalty)
    rows = [Request(RowId("s", index), prompt, sampling) for index, prompt in enumerate(prompts)]
    _, done = serve(llama, rows)
    expected = generate(llama, prompts, repetition_penalty=penalty)
    assert expected != generate(llama, prompts)
    assert [done[index].tokens for index in range(6)] == expected


def test_least_lengths_equal_generate(llama: Path):
    prompts = random_prompts(6, seed=10)
    ends = list(range(0, VOCABULARY, 4))
    sampling = Sampling(NEW_TOKENS, min_new_tokens=5, stop_ids=frozenset(ends))
    rows = [Request(RowId("s", index), prompt, sampling) for index, prompt in enumerate(prompts)]
    _, done = serve(llama, rows)
    expected = generate(llama, prompts, min_new_tokens=5, eos_token_id=ends)
    assert [done[index].tokens for index in range(6)] == expected
    assert {done[index].finish_reason for index in range(6)} >= {"stop"}
    assert all(5 < len(output) <= NEW_TOKENS for output in expected)


def test_samples_of_one_row_run_at_once_and_differ(llama: Path):
    prompt = random_prompts(1, seed=11)[0]
    rows = [
        Request(
            RowId("s", 0),
            prompt,
            Sampling(NEW_TOKENS, temperature=1.5, draw_key=bytes([sample])),
            sample=sample,
            samples=3,
        )
        for sample in range(3)
    ]
    engine = open_tiny(llama).engine
    done = [each for step in engine.run(FakeRequests(rows)) for each in step.completions]
    together = {each.request.sample: each.tokens for each in done}
    assert len({tuple(tokens) for tokens in together.values()}) == 3
    for row in rows:
        assert serve(llama, [row])[1][0].tokens == together[row.sample]


def test_log_probabilities_are_those_of_the_model_before_any_rule(llama: Path):
    prompts = random_prompts(3, seed=12)
    samplings = [
        Sampling(NEW_TOKENS, logprobs=3),
        Sampling(NEW_TOKENS, logprobs=0, repetition_penalty=1.5),
        Sampling(NEW_TOKENS, logprobs=5, temperature=2.0, top_k=9, draw_key=b"k"),
    ]
    rows = [Request(RowId("s", index), prompts[index], samplings[index]) for index in range(3)]
    rows.append(greedy(3, prompts[0]))
    _, done = serve(llama, rows, chunk_size=6)
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    for row in rows[:3]:
        tokens, logprobs = done[row.id.index].tokens, done[row.id.index].logprobs
        with torch.inference_mode():
            logits = model(torch.tensor([[*row.prompt, *tokens[:-1]]])).logits[0]
        expected = logits[len(row.prompt) - 1 :].log_softmax(dim=-1)
        assert [each.token for each in logprobs] == tokens
        found = torch.tensor([each.logprob for each in logprobs])
        torch.testing.assert_close(
            found, expected.gather(1, torch.tensor(tokens)[:, None])[:, 0], atol=1e-4, rtol=1e-4
        )
        best = expected.topk(row.sampling.logprobs or 0, dim=-1).indices.tolist()
        assert [[token for token, _ in each.top] for each in logprobs] == best
    assert done[3].logprobs == ()


@pytest.mark.parametrize("place", ["sample_on_device", "TransformersRunner.logits"])
def test_a_device_that_fails_while_computing_or_drawing_is_named(
    llama: Path, monkeypatch: pytest.MonkeyPatch, place: str
):
    def fails(*arguments: object) -> None:
        raise torch.OutOfMemoryError("no room")

    engine = open_tiny(llama).engine
    monkeypatch.setattr(f"jobrunner.engine.runner.{place}", fails)
    with pytest.raises(InfrastructureError, match="the device is out of memory: no room"):
        list(engine.run(FakeRequests([greedy(0, [1, 2])])))


def test_case_L_on_a_real_model_a_prompt_over_the_kv_memory_cannot_fit(llama: Path):
    block_bytes = 4 * open_tiny(llama).kv_bytes_per_token
    rows = [greedy(0, [1] * 10), greedy(1, [2] * 60), greedy(2, [3] * 10)]
    _, done = serve(llama, rows, kv_memory=10 * block_bytes)
    error = done[1].error
    assert error is not None
    assert error.kind == "cannot_fit"
    assert [done[0].tokens, done[2].tokens] == generate(llama, [rows[0].prompt, rows[2].prompt])


def test_case_U_any_of_several_end_ids_ends_a_text_and_stays_its_last_token(llama: Path):
    prompts = random_prompts(4, seed=5)
    expected = generate(llama, prompts)
    ends = frozenset(output[7] for output in expected)
    rows = [
        Request(RowId("s", index), prompt, Sampling(NEW_TOKENS, stop_ids=ends))
        for index, prompt in enumerate(prompts)
    ]
    _, done = serve(llama, rows)
    for index, output in enumerate(expected):
        first = next(place for place, token in enumerate(output) if token in ends)
        assert done[index].tokens == output[: first + 1]
        assert done[index].finish_reason == "stop"


def test_case_S_a_stop_string_over_two_tokens_ends_the_text(llama: Path):
    prompt = random_prompts(1, seed=6)[0]
    expected = generate(llama, [prompt])[0]
    stop = "".join(chr(ord("0") + token) for token in expected[4:6])
    row = Request(RowId("s", 0), prompt, Sampling(NEW_TOKENS, stop=(stop,)))
    _, done = serve(llama, [row])
    assert (done[0].tokens, done[0].stop_string) == (expected[:6], stop)


def test_keys_and_values_of_different_width_equal_generate(tmp_path: Path):
    # a head of queries and keys that is wider than one of values comes with multi-latent models
    config = DeepseekV3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=6,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=2,
        max_position_embeddings=128,
        initializer_range=0.4,
        bos_token_id=None,
        eos_token_id=None,
    )
    folder = save_model(tmp_path, config)
    prompts = random_prompts(4, seed=7)
    expected = generate(folder, prompts)
    for attention in ("auto", "torch", "reference"):
        rows = [greedy(*row) for row in enumerate(prompts)]
        _, done = serve(folder, rows, chunk_size=6, attention=attention)
        assert [done[index].tokens for index in range(4)] == expected


def test_a_model_in_bfloat16_answers_every_row(tmp_path: Path):
    folder = tiny_llama(tmp_path, initializer_range=0.05)
    engine = open_engine(
        folder, open_text=letters, dtype="bfloat16", device="cpu", block_size=4, kv_memory=2**20
    )
    rows = [greedy(*row) for row in enumerate(random_prompts(5))]
    steps = list(engine.engine.run(FakeRequests(rows)))
    done = [completion for step in steps for completion in step.completions]
    assert [len(completion.tokens) for completion in done] == [NEW_TOKENS] * 5


@pytest.fixture
def host_ahead(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Let engines be one step ahead of a device that is the host itself."""
    monkeypatch.setattr(loading, "TransformersRunner", partial(TransformersRunner, ahead=True))
    return monkeypatch


@pytest.mark.usefixtures("host_ahead")
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("attention", ["auto", "reference"])
def test_the_host_ahead_gives_the_tokens_of_generate(llama: Path, preemption: str, attention: str):
    prompts = random_prompts(18)
    expected = generate(llama, prompts)
    rows = [
        greedy(index, prompt, expected[index][: index if index % 4 == 1 else 0])
        for index, prompt in enumerate(prompts)
    ]
    steps, done = serve(
        llama,
        rows,
        chunk_size=7,
        kv_memory=36 * 4 * open_tiny(llama).kv_bytes_per_token,
        scheduling=BatchingTable(preemption=preemption),
        ahead=False,
        attention=attention,
    )
    assert [done[index].tokens for index in range(18)] == expected
    assert sum(step.preemptions for step in steps) > 0
    assert sum(step.tokens_cached for step in steps) > 0


def test_the_host_ahead_changes_no_row_of_any_kind(llama: Path, request: pytest.FixtureRequest):
    ends = Sampling(NEW_TOKENS, stop_ids=frozenset(range(0, VOCABULARY, 5)))
    kinds = [ends, *(each for each in MIXED if each.repetition_penalty == 1)]
    kinds = [each for each in kinds if each.frequency_penalty == 0]
    prompts = random_prompts(3 * len(kinds), seed=8)
    rows = [
        Request(RowId("s", index), prompt, kinds[index % len(kinds)])
        for index, prompt in enumerate(prompts)
    ]
    _, plain = serve(llama, rows)
    request.getfixturevalue("host_ahead")
    steps, ahead = serve(llama, rows)
    assert sum(step.tokens_padded for step in steps) > 0, "no text ended by itself"
    for index in range(len(rows)):
        for name in ("tokens", "finish_reason", "stop_string"):
            assert getattr(ahead[index], name) == getattr(plain[index], name)
        said, expected = ahead[index].logprobs, plain[index].logprobs
        assert [each.token for each in said] == [each.token for each in expected]
        # the batches are others, so that sums are rounded otherwise
        assert [each.logprob for each in said] == pytest.approx(
            [each.logprob for each in expected], abs=1e-4
        )


def test_the_host_ahead_names_the_rows_of_a_broken_model(
    llama: Path, host_ahead: pytest.MonkeyPatch
):
    def broken(*arguments: object) -> torch.Tensor:
        return torch.full((9, VOCABULARY), torch.nan)

    engine = open_tiny(llama).engine
    host_ahead.setattr(TransformersRunner, "logits", broken)
    sampling = Sampling(4, temperature=1.0, logprobs=1, draw_key=b"k")
    row = Request(RowId("s", 3), [1, 2], sampling)
    with pytest.raises(InfrastructureError) as raised:
        list(engine.run(FakeRequests([row])))
    assert str(raised.value) == (
        "the model gives logits that are not finite for row 3 of `s` and 0 more, in step 1"
        " (0 single tokens, 2 of prompts, 0 swapped blocks; row 3 of `s`); the device is `cpu`"
    )


@pytest.mark.parametrize("attention", ["kernels", "torch", "reference"])
def test_a_batch_that_keeps_its_finished_rows_is_padded_and_equals_generate(llama: Path, attention):
    lengths = [2, 9, 4, 7, 1, 3]
    prompts = random_prompts(len(lengths), seed=21)
    rows = [
        Request(RowId("s", index), prompt, Sampling(length))
        for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    scheduling = BatchingTable(policy="static", order="input")
    settings = {"scheduling": scheduling, "max_batch_size": 3, "attention": attention}
    settings |= {"token_budget": 200, "chunk_size": 200}
    steps, done = serve(llama, rows, **settings)
    expected = [
        generate(llama, [prompt], length)[0]
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    assert [done[index].tokens for index in range(len(rows))] == expected
    # each batch lasts as long as its longest row
    assert sum(step.tokens_padded for step in steps) == (7 + 0 + 5) + (0 + 6 + 4)
