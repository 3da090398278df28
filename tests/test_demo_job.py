"""The demo model on the quickstart's rows, token for token against transformers' `generate`."""

from pathlib import Path

import pytest

from jobrunner import job as jobs
from jobrunner.config import load_settings
from jobrunner.data.models import demo_model_folder, missing_demo_files
from jobrunner.data.sources import Reader
from jobrunner.records import Request

JOB = Path(__file__).parent.parent / "jobs/quickstart.toml"
NEAR_TIE = 1e-4
BATCH = 32


@pytest.mark.slow
@pytest.mark.skipif(
    bool(missing_demo_files(demo_model_folder())), reason="scripts/demo_model was not run"
)
def test_the_64_rows_equal_generate_but_for_near_ties(tmp_path):
    import torch

    from jobrunner.engine.loading import load_model

    settings = load_settings(
        JOB, [f'output.path="{tmp_path}"', "model.dtype=float32"], style="plain"
    )
    answers = {}
    jobs.run(settings, observe=lambda step: answers.update((c.id, c) for c in step.completions))
    job = jobs.open_job(settings)
    model = load_model(job.model_folder, "float32", "cpu")
    reader = Reader(list(job.input.shards.values()), settings.input.column)
    rows = [row for span in job.input.spans for batch in reader.read(span) for row in batch]
    requests = [r for r in job.prompts.encode(rows, {}) if isinstance(r, Request)]
    assert len(answers) == len(requests) == 64
    different = []
    for start in range(0, len(requests), BATCH):
        batch = requests[start : start + BATCH]
        for request, expected in zip(batch, generate(model, batch), strict=True):
            got = list(answers[request.id].tokens)
            if got == expected:
                continue
            same = next(
                place
                for place, (one, other) in enumerate(zip(got, expected, strict=False))
                if one != other
            )
            context = torch.tensor([[*request.prompt, *expected[:same]]])
            with torch.inference_mode():
                logits = model(input_ids=context).logits[0, -1]
            gap = float((logits[expected[same]] - logits[got[same]]).abs())
            print(f"{request.id} differs at token {same}, gap of the two best logits {gap:.2e}")
            different.append(gap)
    print(f"{len(requests)} rows, {len(different)} differ")
    assert all(gap < NEAR_TIE for gap in different)


def generate(model, batch):
    """The output tokens of each request, up to and with its end, by left-padded batches."""
    import torch

    width = max(len(request.prompt) for request in batch)
    ends = sorted(batch[0].sampling.stop_ids)
    ids = torch.full((len(batch), width), ends[0])
    mask = torch.zeros_like(ids)
    for row, request in enumerate(batch):
        ids[row, width - len(request.prompt) :] = torch.tensor(list(request.prompt))
        mask[row, width - len(request.prompt) :] = 1
    with torch.inference_mode():
        output = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=batch[0].sampling.max_new_tokens,
            do_sample=False,
            eos_token_id=ends,
            pad_token_id=ends[0],
        )
    return [until_end(tokens, ends) for tokens in output[:, width:].tolist()]


def until_end(tokens, ends):
    stop = next((place + 1 for place, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[:stop]
