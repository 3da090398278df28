"""The demo model on the quickstart's rows, token for token against transformers' `generate`."""

from pathlib import Path

import pytest

from jobrunner import job as jobs
from jobrunner.data.models import demo_model_folder, missing_demo_files
from jobrunner.jobfile import load_settings
from jobrunner.opening import open_job
from tests.reference import NEAR_TIE, gap_at_first_difference, generate, requests_of

JOB = Path(__file__).parent.parent / "jobs/quickstart.toml"


@pytest.mark.slow
@pytest.mark.skipif(
    bool(missing_demo_files(demo_model_folder())), reason="scripts/demo_model was not run"
)
def test_the_64_rows_equal_generate_but_for_near_ties(tmp_path):
    from jobrunner.engine.loading import load_model

    changed = [f'output.path="{tmp_path}"', "model.dtype=float32"]
    settings = load_settings(JOB, changed, style="plain")
    answers = {}
    jobs.run(settings, observe=lambda step: answers.update((c.id, c) for c in step.completions))
    job = open_job(settings)
    model = load_model(job.model_folder, "float32", "cpu")
    requests = requests_of(job)
    assert len(answers) == len(requests) == 64
    gaps = []
    for request, expected in generate(model, requests, batch_size=32):
        got = list(answers[request.id].tokens)
        if got != expected:
            gaps.append(gap_at_first_difference(model, request.prompt, expected, got))
            print(f"{request.id} differs, gap of the two best logits {gaps[-1]:.2e}")
    print(f"{len(requests)} rows, {len(gaps)} differ")
    assert all(gap < NEAR_TIE for gap in gaps)
