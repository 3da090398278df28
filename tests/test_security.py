"""What comes from outside can do no harm: names, rows, templates, models. See jobs/SECURITY.md."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from jobrunner import job as jobs
from jobrunner.data.input.files import LocalFile
from jobrunner.data.input.finding import _check_name
from jobrunner.data.layout import RunDirectory
from jobrunner.data.ledger import _merge_claim, _span_claim
from jobrunner.data.openai.reading import errors_path
from jobrunner.data.prompts import tokenizer
from jobrunner.errors import ConfigError, ExitCode
from jobrunner.records import Span
from tests.fake_cbjob import COMMAND, FakeTokenizer, read_fake_model, save_fake_model
from tests.prompt_jobs import error_of, open_prompts
from tests.tiny_tokenizers import byte_level
from tests.world import World, fake_engine

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "jobrunner").rglob("*.py"))
FILE = LocalFile(Path("/input/x"))


@pytest.fixture
def world(tmp_path):
    model = save_fake_model(tmp_path / "model")
    (tmp_path / "job").mkdir()
    world = World(tmp_path / "job", model)
    text = world.job_file.read_text()
    world.job_file.write_text(text.replace('"prompt"\n', '"prompt"\nchat = false\n', 1))
    return world


@pytest.mark.parametrize(
    "name", ["../x", "a/../../x", "/etc/x", "a//x", ".", "a/.", "a\0x", "\ud800"]
)
def test_a_name_that_leads_out_of_the_run_directory_is_refused(name):
    with pytest.raises(ConfigError, match=r"cannot be that of a result file|is not UTF-8"):
        _check_name(name, FILE)


@given(st.text(st.sampled_from("a.\\/~$*é\n"), min_size=1) | st.text(min_size=1))
def test_no_name_of_an_input_leads_out_of_its_place_in_the_run_directory(name):
    try:
        _check_name(name, FILE)
    except ConfigError:
        assume(False)
    run = RunDirectory(Path("/run"), "worker-1-aa")
    places = {
        run.results: [run.result(name), errors_path(run, name)],
        run.state / "parts": [run.parts(name)],
        run.state / "partials": [run.partial(Span(name, 0, 1))],
        run.state / "retries": [run.retries(name)],
        run.state / "tallies": [run.tally(name)],
        run.state / "cuts": [run.cuts(name)],
        run.claims: [run.claims / _span_claim(Span(name, 0, 1)), run.claims / _merge_claim(name)],
    }
    for folder, paths in places.items():
        for path in paths:
            assert os.path.normpath(path).startswith(f"{folder}/")


def calls(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield node, ast.unparse(node.func)


NEVER_IMPORTED = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml", "code"}
NEVER_CALLED = {"eval", "exec", "__import__", "os.system", "os.popen", "torch.load", "np.load"}
NEVER_TRUE = {"shell", "trust_remote_code", "allow_pickle"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_source_unpickles_evaluates_or_starts_a_shell(path):
    tree = ast.parse(path.read_text())
    imported = {
        name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in [getattr(node, "module", None) or "", *(one.name for one in node.names)]
    }
    assert not imported & NEVER_IMPORTED
    for node, function in calls(tree):
        assert function not in NEVER_CALLED
        for keyword in node.keywords:
            harmless = isinstance(keyword.value, ast.Constant) and not keyword.value.value
            assert keyword.arg not in NEVER_TRUE or harmless


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages[0].content.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% for i in range(10**9) %}x{% endfor %}",
    ],
)
def test_the_chat_template_of_a_model_is_sandboxed(tmp_path, template):
    prompts = open_prompts(byte_level(tmp_path, template=template), messages="m", chat=True)
    kind, _ = error_of(prompts, [{"role": "user", "content": "x"}])
    assert kind == "template_error"


def read_in_a_child(path):
    """Read the column `prompt` of a file; return what came, sorted, and the MiB that it took."""
    code = (
        "import sys\n"
        "from collections import Counter\n"
        "from pathlib import Path\n"
        "from jobrunner.data.input.shards import cut_spans\n"
        "from jobrunner.data.input.sources import Reader\n"
        "from jobrunner.errors import ConfigError\n"
        "from tests.data.reading import look\n"
        "from tests.test_odd_shards import memory_bytes\n"
        "before, came = memory_bytes('VmRSS'), Counter()\n"
        "try:\n"
        "    shards = look(Path(sys.argv[1]), ['prompt'])\n"
        "    with Reader(shards, 'prompt') as reader:\n"
        "        for span in cut_spans(shards):\n"
        "            for batch in reader.read(span):\n"
        "                for row in batch:\n"
        "                    came[row.error.kind if row.error else str(row.value[0])[:4]] += 1\n"
        "except ConfigError as error:\n"
        "    came['refused'] += 1\n"
        "grown = memory_bytes('VmHWM') - before\n"
        "print(*(f'{what}={n}' for what, n in sorted(came.items())), grown)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], cwd=ROOT, capture_output=True, text=True
    )
    assert not done.returncode, done.stderr
    *came, peak_bytes = done.stdout.split()
    return came, int(peak_bytes) >> 20


def test_a_line_that_unpacks_to_half_a_gigabyte_is_an_error_row_in_bounded_memory(tmp_path):
    path = tmp_path / "a.jsonl.zst"
    with pa.output_stream(str(path), compression="zstd") as file:
        file.write(b'{"prompt": "')
        for _ in range(512):
            file.write(bytes(2**20).replace(b"\0", b"x"))
        file.write(b'"}\n{"prompt": "next"}\n')
    assert path.stat().st_size < 2**20
    came, peak_mib = read_in_a_child(path)
    assert came == ["bad_text=1", "n=1"]
    assert peak_mib < 400


def test_a_csv_record_of_many_lines_and_fields_is_an_error_in_bounded_memory(tmp_path):
    """Fields within quotes go on for lines: no line and no field is too long, the record is."""
    path = tmp_path / "a.csv.zst"
    field = b"x" * (40 * 2**20)
    with pa.output_stream(str(path), compression="zstd") as file:
        file.write(b'prompt\n"')
        for _ in range(10):
            file.write(field + b'\n","')
        file.write(b'"\n')
    assert path.stat().st_size < 2**20
    came, peak_mib = read_in_a_child(path)
    assert came == ["bad_text=10"]
    assert peak_mib < 400


BIG = 20_000_000
ZEROS = 140_000_000


def once(text, places):
    """So many texts that are one."""
    return pa.DictionaryArray.from_arrays(pa.array([0] * places, pa.int32()), pa.array([text]))


def zeros(count):
    return pa.UInt8Array.from_buffers(pa.uint8(), count, [None, pa.py_buffer(bytes(count))])


def lists_of(values, *lengths):
    ends = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), values)


# what is written, how, and what comes of it
BOMBS = {
    "one text again and again": (lambda: once("x" * BIG, 64), {}, ["x=64"]),
    "one text in many pages": (
        lambda: once("x" * BIG, 64),
        {"use_dictionary": False, "write_batch_size": 1},
        ["x=64"],
    ),
    "one text in one page": (
        lambda: once("x" * BIG, 64),
        {"use_dictionary": False},
        ["refused=1"],
    ),
    "ever the same beginning": (
        lambda: pa.array(["x" * BIG] * 64),
        {
            "use_dictionary": False,
            "column_encoding": {"prompt": "DELTA_BYTE_ARRAY"},
        },
        ["x=64"],
    ),
    "a text over the limit": (lambda: once("x" * 4 * BIG, 16), {}, ["bad_text=16"]),
    "a list of one text": (
        lambda: lists_of(once("x" * BIG, 65), 1, 64),
        {},
        ["bad_text=1", "xxxx=1"],
    ),
    "lists of one text": (lambda: lists_of(once("x" * BIG, 64), *[1] * 64), {}, ["xxxx=64"]),
    "lists of ever the same beginning": (
        lambda: lists_of(pa.array(["x" * BIG] * 64), *[1] * 64),
        {
            "use_dictionary": False,
            "column_encoding": {"prompt.list.element": "DELTA_BYTE_ARRAY"},
        },
        ["refused=1"],
    ),
    "a list of one number": (
        lambda: lists_of(zeros(ZEROS), ZEROS),
        {},
        ["refused=1"],
    ),
}


# those that take long to write or to read
SLOW = BOMBS.keys() - {"one text again and again", "a list of one text"}


@pytest.mark.parametrize(
    ("make", "options", "expected"),
    [
        pytest.param(*bomb, marks=[pytest.mark.slow] * (name in SLOW), id=name)
        for name, bomb in BOMBS.items()
    ],
)
def test_parquet_that_unpacks_to_gigabytes_is_read_or_refused_in_bounded_memory(
    tmp_path, make, options, expected
):
    path = tmp_path / "a.parquet"
    table = pa.table({"prompt": make()})
    pq.write_table(table, path, compression="zstd", store_schema=False, **options)
    del table
    assert path.stat().st_size < 2**20
    came, peak_mib = read_in_a_child(path)
    assert came == expected
    print(f"{peak_mib} MiB")
    assert peak_mib < 800


def test_control_characters_of_names_do_not_reach_the_log_file(world, monkeypatch):
    """`tail -f log.txt` is a terminal, too."""
    monkeypatch.setattr(tokenizer, "_load", FakeTokenizer)
    world.add_shard("a\x1b[2J\n2026 INFO forged.parquet", ["x", "y"])
    jobs.run(world.settings(), open_engine=fake_engine(), read_model=read_fake_model)
    log = (world.folder / "run/log.txt").read_text()
    assert "finished shard a\N{REPLACEMENT CHARACTER}[2J\n  2026 INFO forged" in log
    assert not {c for c in log if not c.isprintable()} - {"\n"}


SECRETS = {
    "HF_TOKEN": "hf_hunter2secret",
    "AWS_SECRET_ACCESS_KEY": "aws+hunter2secret",
    "DATABASE_URL": "postgres://me:hunter2secret@db/x",
}


@pytest.mark.parametrize("arguments", [["run"], ["submit", "--print"], ["status", "--json"]])
@pytest.mark.parametrize("fails", [False, True], ids=["well", "with an error"])
def test_secrets_of_the_environment_are_in_no_log_and_no_result(world, arguments, fails):
    world.add_shard("a.parquet", ["x", None] * 5)
    fake = '{"killer": 4, "death": "raise"}' if fails else "{}"
    options = []
    environment = {**os.environ, **SECRETS, "CBJOB_FAKE": fake}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    if fails and arguments != ["run"]:
        options = ["--set", "input.prompt=0"]
    done = subprocess.run(
        [*COMMAND, arguments[0], str(world.job_file), *arguments[1:], *options],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode not in (ExitCode.OK, ExitCode.ROW_ERRORS)) == fails, done.stderr
    written = [path.read_bytes() for path in world.folder.rglob("*") if path.is_file()]
    for said in (done.stdout, done.stderr, *(content.decode("latin-1") for content in written)):
        assert "hunter2" not in said
