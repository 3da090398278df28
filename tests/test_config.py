"""Job files: what is accepted, and how everything wrong is said at once."""

from pathlib import Path

import pytest

from jobrunner.config import NOT_YET
from jobrunner.errors import ConfigError
from jobrunner.jobfile import load_settings

GOLDEN = Path(__file__).parent / "golden"
SMALL = """
[input]
path = "data"
prompt = "question"
[output]
path = "out"
[model]
name = "demo"
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda text: Path(tmp_path / "job.toml").write_text(text) and Path("job.toml")


def test_six_lines_are_a_job(job, tmp_path):
    settings = load_settings(job(SMALL))
    assert settings.input.column == "question"
    assert settings.run_directory == tmp_path / "out"
    assert settings.generation.temperature == 0
    assert settings.batching.kv_memory == "auto"


def test_durations_and_sizes_have_units(job):
    text = SMALL + '[checkpoint]\nevery = "250ms"\ngrace = "2m"\n[batching]\nkv_memory = "1.5GiB"'
    settings = load_settings(job(text))
    assert settings.checkpoint.every == 0.25
    assert settings.checkpoint.grace == 120
    assert settings.batching.kv_memory == 3 * 2**29


def test_one_value_stands_for_a_list_of_one(job):
    settings = load_settings(job(SMALL + '[generation]\nstop = "###"\nstop_token_ids = 5'))
    assert settings.generation.stop == ("###",)
    assert settings.generation.stop_token_ids == (5,)


def test_set_changes_a_key_with_or_without_quotes(job):
    overrides = ["generation.max_new_tokens=7", "model.dtype=float32", 'job.name="x y"']
    settings = load_settings(job(SMALL), overrides, limit=3, style="plain")
    assert settings.generation.max_new_tokens == 7
    assert settings.model.dtype == "float32"
    assert settings.job.name == "x y"
    assert (settings.limit, settings.progress.style) == (3, "plain")


def test_every_problem_is_said_at_once(job):
    text = """
[job]
nam = "x"
[input]
path = "data"
prompt = "q"
messages = "m"
[output]
[model]
name = "demo"
threads = "many"
dtype = "int3"
attention = "x"
allow_unsafe_weights = true
[generation]
max_token = 5
temperature = -1
stop = ""
max_new_tokens = 0
[batching]
max_batch_size = 8
token_budget = 4
kv_memory = "8 gb"
[checkpoint]
every = 30
[slurm]
partition = "a b"
[batchin]
x = 1
"""
    with pytest.raises(ConfigError) as raised:
        load_settings(job(text), ["generation.top_p=2", "foo", "model.device=gpu"])
    assert str(raised.value) + "\n" == (GOLDEN / "every_problem.txt").read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = [", "`job.toml` is not valid TOML"),
        ("job = 3\n" + SMALL, "`job` in `job.toml` = 3: must be a table"),
        (SMALL.replace('prompt = "question"', ""), "must name one of `prompt`"),
        (SMALL + "[generation]\ntemperature = nan", "`generation.temperature` in"),
        (SMALL + "[generation]\nmax_new_tokens = true", "`generation.max_new_tokens` in"),
        (SMALL + f'[batching]\nkv_memory = "{"9" * 400}GiB"', "is beyond all bounds"),
    ],
)
def test_a_wrong_job_file_is_said_in_words(job, text, message):
    with pytest.raises(ConfigError) as raised:
        load_settings(job(text))
    assert message in str(raised.value)


def test_a_missing_job_file_is_said_in_words(tmp_path):
    with pytest.raises(ConfigError, match="no job file"):
        load_settings(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="is a folder"):
        load_settings(tmp_path)


@pytest.mark.parametrize(("said", "seconds"), [("auto", "auto"), ("90s", 90), ("2m", 120)])
def test_the_longest_step_is_a_duration_or_auto(job, said, seconds):
    settings = load_settings(job(SMALL), [f"batching.max_step={said}"])
    assert settings.batching.max_step == seconds
    assert load_settings(job(SMALL)).batching.max_step == "auto"


@pytest.mark.parametrize("said", ["0s", "-1s", "5", "true", "never"])
def test_a_wrong_longest_step_is_refused(job, said):
    with pytest.raises(ConfigError, match="1 problem") as raised:
        load_settings(job(SMALL), [f"batching.max_step={said}"])
    assert "`batching.max_step`" in str(raised.value)


@pytest.mark.parametrize(
    ("table", "key"), [(table, key) for table, keys in NOT_YET.items() for key in sorted(keys)]
)
def test_a_key_whose_feature_comes_later_is_refused_as_not_yet(job, table, key):
    with pytest.raises(ConfigError, match="1 problem") as raised:
        load_settings(job(SMALL), [f"{table}.{key}=1"])
    assert "is not yet supported" in str(raised.value)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ('[output]\npath = "r"\nformat = "jsonl"\ncompression = "snappy"', "is for Parquet"),
        ("[generation]\nstop_on_repetition = 2", "must be 0 (off) or at least 3"),
        ("[batching]\npreferred_batch_size = 8", "how long rows may wait for each other"),
        ("[generation]\nmin_new_tokens = 9\nmax_new_tokens = 8", "is over `max_new_tokens` 8"),
        ('[input]\nprompt = "p"\npath = "a"\ndataset = "b"', "`path` or as `dataset`, not both"),
        ('[input]\nprompt = "p"\npath = "a"\ntemplate = "t"', "must name one of `prompt`"),
        ('[input]\npath = "a"\ntoken_ids = "t"\nprefill = "x"', "drop `prefill`"),
        ('[input]\npath = "a"\nprompt = ""', "at least 1 character"),
        ('[input]\npath = "a"\nprompt = "p"\nsplit = "test"', "belong to `dataset`"),
        ('[workers]\ncount = 3\ndevices = ["0", "1"]', "`count` is 3, but `devices` has 2"),
        ('[workers]\ndevices = ["0", "0"]', "`devices` names one twice"),
        ('[workers]\nengine = "ray"\ndevices = ["0"]', "`devices` are those of this machine"),
    ],
)
def test_values_that_contradict_each_other_are_refused(job, lines, said):
    tables = {
        "input": '[input]\npath = "in"\nprompt = "p"',
        "output": '[output]\npath = "run"',
        "model": '[model]\nname = "demo"',
    }
    tables.pop(lines[1 : lines.index("]")], None)
    with pytest.raises(ConfigError) as raised:
        load_settings(job("\n".join([*tables.values(), lines])))
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("text", "value"), [("0.9", 0.9), ('"0.9"', 0.9), ("1.0", 1.0), ('"1"', 1.0), ('"8GiB"', 2**33)]
)
def test_kv_memory_is_a_size_or_a_share(job, text, value):
    found = load_settings(job(SMALL + f"[batching]\nkv_memory = {text}")).batching.kv_memory
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("text", ["0.0", '"0"', "1.01", '"1.5"', "-0.5", '"-0.5"', "inf", "nan"])
def test_a_share_of_memory_is_over_0_and_up_to_1(job, text):
    with pytest.raises(ConfigError, match="must be a share over 0 and up to 1, or a size like"):
        load_settings(job(SMALL + f"[batching]\nkv_memory = {text}"))
