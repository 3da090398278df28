"""`cbjob init`: the template and the schema know every key, and can be used as they are."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from jobrunner.commands.init import STDOUT, init_command, job_schema, template
from jobrunner.commands.keys import EXAMPLES, KEYS, REQUIRED, TABLES_HELP
from jobrunner.config import SOURCES, TABLES, table_model
from jobrunner.errors import ConfigError
from jobrunner.jobfile import load_settings

EVERY_KEY = [(table, key) for table in TABLES for key in table_model(table).model_fields]


def uncommented(table: str, key: str) -> str:
    """The line of a key in the template, without its # and its comment."""
    section = template("job.toml").partition(f"\n[{table}]\n")[2].partition("\n\n")[0]
    (line,) = [line for line in section.splitlines() if re.match(rf"(# )?{key} = ", line)]
    return line.removeprefix("# ")


def write(folder: Path, text: str) -> Path:
    path = folder / "job.toml"
    path.write_text(text)
    return path


def test_the_template_is_a_job(tmp_path):
    settings = load_settings(write(tmp_path, template("job.toml")))
    assert settings.run_directory == tmp_path / "runs/first"


@pytest.mark.parametrize(("table", "key"), EVERY_KEY)
def test_every_key_stands_in_the_template_with_its_default(tmp_path, table, key):
    document = tomllib.loads(template("job.toml"))
    value = tomllib.loads(uncommented(table, key))[key]
    if table == "input" and key in (*SOURCES, "token_ids"):
        document["input"].pop("prompt")
    if key == "dataset":
        document["input"].pop("path")
    if key == "preferred_batch_size":
        document["batching"] = {"max_queue_delay": "1s"}
    if key in ("split", "streaming"):
        document["input"] = {"dataset": "d", "prompt": "p"}
    text = "\n".join(
        f"[{name}]\n" + "\n".join(f"{k} = {toml(v)}" for k, v in entries.items())
        for name, entries in (document | {table: document.get(table, {}) | {key: value}}).items()
    )
    settings = load_settings(write(tmp_path, text))
    found = getattr(getattr(settings, table), key)
    if f"{table}.{key}" not in EXAMPLES:
        assert found == table_model(table).model_fields[key].default
    else:
        assert found is not None


def toml(value: object) -> str:
    return "{}" if value == {} else json.dumps(value)


def test_every_key_has_one_description_and_no_other_has():
    known = {table: set(table_model(table).model_fields) for table in TABLES}
    assert {table: set(keys) for table, keys in KEYS.items()} == known
    assert set(TABLES_HELP) == set(TABLES)
    every = {f"{table}.{key}" for table, key in EVERY_KEY}
    assert set(EXAMPLES) <= every
    assert set(REQUIRED) <= set(EXAMPLES)


def test_the_schema_describes_every_key_as_a_file_says_it():
    schema = job_schema()
    assert sorted(schema["properties"]) == sorted(TABLES)
    assert schema["required"] == ["input", "output", "model"]
    every = schema["$defs"]["CheckpointTable"]["properties"]["every"]
    assert (every["type"], every["default"]) == ("string", "30s")
    keep = schema["$defs"]["InputTable"]["properties"]["keep"]
    assert [option["type"] for option in keep["anyOf"]] == ["string", "array"]
    assert keep["description"] == KEYS["input"]["keep"]


def test_init_writes_the_template_and_never_overwrites(tmp_path, capsys):
    path = tmp_path / "mine.toml"
    assert init_command(path, schema=False) == 0
    assert path.read_text() == template("mine.toml")
    path.write_text("precious")
    with pytest.raises(ConfigError, match="is there already"):
        init_command(path, schema=False)
    assert path.read_text() == "precious"
    assert str(path) in capsys.readouterr().out


def test_a_folder_that_is_not_there_is_said_in_words(tmp_path):
    with pytest.raises(ConfigError, match="cannot write"):
        init_command(tmp_path / "none" / "job.toml", schema=False)


def test_init_prints_the_template_or_the_schema(capsys):
    assert init_command(STDOUT, schema=False) == 0
    assert capsys.readouterr().out == template("job.toml")
    assert init_command(STDOUT, schema=True) == 0
    assert json.loads(capsys.readouterr().out) == job_schema()
