"""`model.name` to a folder, and what makes two model folders the same."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from jobrunner.data.models import (
    DEMO_FILES,
    demo_model_folder,
    model_fingerprint,
    resolve_model,
)
from jobrunner.errors import ConfigError
from tests.loopback import serving

KIB = 2**10
MIB = 2**20


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_demo_lies_in_the_users_cache(cache: Path) -> None:
    assert demo_model_folder() == cache / "cbjob" / "models" / "smollm2-135m-instruct"


def test_relative_cache_home_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    assert demo_model_folder().is_relative_to(Path.home() / ".cache")


def test_prepared_demo_is_found(cache: Path, tmp_path: Path) -> None:
    folder = demo_model_folder()
    folder.mkdir(parents=True)
    for name in DEMO_FILES:
        (folder / name).touch()
    assert resolve_model("demo", tmp_path) == folder


def test_unprepared_demo_says_how_to_prepare_it(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the demo model is not prepared") as caught:
        resolve_model("demo", tmp_path)
    assert caught.value.hint.startswith("run `scripts/demo_model`")


@pytest.mark.parametrize("name", ["my/model", "./my/model", "my/../my/model"])
def test_local_folder_is_relative_to_the_job_file(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "my" / "model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert resolve_model(name, tmp_path).samefile(folder)
    assert resolve_model(str(folder), tmp_path / "elsewhere") == folder


def test_local_folder_without_config_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(ConfigError, match=r"lacks config\.json"):
        resolve_model("model", tmp_path)


@pytest.mark.parametrize("also", [(), ("config.json",)])
def test_an_adapter_is_refused(tmp_path: Path, also: tuple[str, ...]) -> None:
    for file in ("adapter_config.json", "adapter_model.safetensors", *also):
        (tmp_path / file).write_text("{}")
    with pytest.raises(ConfigError, match="LoRA adapters are not supported") as caught:
        resolve_model(str(tmp_path), tmp_path)
    assert caught.value.hint.startswith("merge it into its base model first")


@pytest.mark.parametrize("name", ["model", "model/weights.gguf"])
def test_gguf_files_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights.gguf").touch()
    with pytest.raises(ConfigError, match="GGUF") as caught:
        resolve_model(name, tmp_path)
    assert caught.value.hint == "take the model in the transformers format"


@pytest.mark.parametrize("name", ["absent", "./absent/model", "a/b/c", "", "/absent", "org/.."])
def test_name_that_is_neither_folder_nor_hub_id_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_model(name, tmp_path)
    assert f"`model.name` is `{name}`" in str(caught.value)


# --- the hub, played by a server on loopback

COMMIT = "c0ffee" + "0" * 34
OLDER = "01de4" + "0" * 35
REVISIONS = {"main": COMMIT, "v1": OLDER, OLDER: OLDER}
MODEL = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"pickle",
    "README.md": b"# model",
    "onnx/model.safetensors": b"for another program",
}


class StandInHub(BaseHTTPRequestHandler):
    """The answers of a model hub that `snapshot_download` asks for."""

    commit = COMMIT
    repositories: dict[str, dict[str, bytes]] = {  # noqa: RUF012
        "org/model": MODEL,
        "org/pickled": {"config.json": b"{}", "pytorch_model.bin": b"pickle"},
        "org/adapter": {"adapter_config.json": b"{}", "adapter_model.safetensors": b"few"},
        "org/other-format": {"weights.safetensors": b"weights"},
    }

    def do_GET(self) -> None:
        self.answer()

    def do_HEAD(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = self.path.split("?")[0].lstrip("/")
        if path.startswith("api/models/org/gated/"):
            self.refuse(403, "GatedRepo")
            return
        if path.startswith("api/models/org/ill/"):
            self.refuse(500, "")
            return
        for name, files in self.repositories.items():
            for revision, commit in REVISIONS.items():
                if self.answer_repository(path, name, revision, commit, files):
                    return
        known = any(path.startswith(f"api/models/{name}/") for name in self.repositories)
        self.refuse(404, "RevisionNotFound" if known else "RepoNotFound")

    def answer_repository(
        self, path: str, name: str, revision: str, commit: str, files: dict[str, bytes]
    ) -> bool:
        self.commit = commit
        if commit == OLDER:
            files = {**files, "model.safetensors": b"older weights"}
        file = path.removeprefix(f"{name}/resolve/{commit}/")
        if path == f"api/models/{name}/revision/{revision}":
            siblings = [{"rfilename": file} for file in files]
            self.reply_json({"id": name, "sha": commit, "siblings": siblings})
        elif path.startswith(f"api/models/{name}/tree/{commit}"):
            self.reply_json([tree_entry(file, data) for file, data in files.items()])
        elif file in files:
            self.reply(files[file])
        else:
            return False
        return True

    def reply_json(self, value: Any) -> None:
        self.reply(json.dumps(value).encode(), "application/json")

    def reply(self, body: bytes, kind: str = "application/octet-stream") -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", self.commit)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


def tree_entry(path: str, data: bytes) -> dict[str, Any]:
    return {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}


@contextmanager
def stand_in_hub() -> Iterator[str]:
    with serving(StandInHub) as endpoint:
        yield endpoint


@dataclass(frozen=True)
class Outcome:
    """What `resolve_model` did: a folder, or the kind of its error, its message and hint."""

    folder: str = ""
    error: str = ""
    message: str = ""
    hint: str = ""


# the hub's client reads its environment when it is imported: each case gets its own process
RESOLVE = """
import json, sys
from pathlib import Path
from jobrunner.data.models import resolve_model
from jobrunner.errors import JobError

try:
    revision = sys.argv[3] if len(sys.argv) > 3 else None
    outcome = {"folder": str(resolve_model(sys.argv[1], Path(sys.argv[2]), revision))}
except JobError as error:
    outcome = {"error": type(error).__name__, "message": str(error), "hint": error.hint}
print(json.dumps(outcome))
"""


def resolve(
    name: str, base: Path, endpoint: str, revision: str | None = None, **environment: str
) -> Outcome:
    arguments = [name, str(base)] + ([revision] if revision is not None else [])
    result = subprocess.run(
        [sys.executable, "-c", RESOLVE, *arguments],
        env=os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(base / "hf")} | environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return Outcome(**json.loads(result.stdout))


def test_hub_model_is_downloaded_without_pickles_and_found_again_offline(tmp_path: Path) -> None:
    with stand_in_hub() as endpoint:
        online = resolve("org/model", tmp_path, endpoint)
    offline = resolve("org/model", tmp_path, endpoint, HF_HUB_OFFLINE="1")
    files = {path.name: path.read_bytes() for path in Path(online.folder).iterdir()}
    wanted = ("config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors")
    assert files == {name: MODEL[name] for name in wanted}
    assert offline == online


@pytest.mark.parametrize("revision", ["v1", OLDER])
def test_a_revision_of_a_hub_model_is_what_is_downloaded(tmp_path: Path, revision: str) -> None:
    with stand_in_hub() as endpoint:
        newest = resolve("org/model", tmp_path, endpoint)
        older = resolve("org/model", tmp_path, endpoint, revision)
    assert Path(older.folder).name == OLDER
    assert (Path(older.folder) / "model.safetensors").read_bytes() == b"older weights"
    assert (Path(newest.folder) / "model.safetensors").read_bytes() == b"weights"


def test_an_unknown_revision_is_named(tmp_path: Path) -> None:
    with stand_in_hub() as endpoint:
        outcome = resolve("org/model", tmp_path, endpoint, "v9")
    assert outcome == Outcome(
        error="ConfigError",
        message="`model.revision` is `v9`, but the hub model `org/model` has no such revision",
        hint="give a branch, a tag or a commit of it",
    )


@pytest.mark.parametrize("name", ["demo", "model", "nowhere"])
def test_a_revision_of_what_is_not_on_a_hub_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(ConfigError, match=f"`model.name` `{name}` is not on a hub") as caught:
        resolve_model(name, tmp_path, "v1")
    assert caught.value.hint.startswith("revisions belong to hub models")


def test_unknown_hub_model_names_folder_and_id(tmp_path: Path) -> None:
    with stand_in_hub() as endpoint:
        outcome = resolve("org/absent", tmp_path, endpoint)
    assert outcome == Outcome(
        error="ConfigError",
        message=f"`model.name` is `org/absent`, but there is no folder `{tmp_path}/org/absent` "
        "and no such hub model",
        hint="check the spelling; a private model needs `hf auth login`",
    )


def test_gated_hub_model_says_how_to_get_in(tmp_path: Path) -> None:
    with stand_in_hub() as endpoint:
        outcome = resolve("org/gated", tmp_path, endpoint)
    assert outcome.error == "ConfigError"
    assert outcome.hint == "accept them on the model's page and log in with `hf auth login`"


@pytest.mark.parametrize(
    ("name", "lacks"),
    [("org/pickled", "no safetensors weights"), ("org/other-format", "no config.json")],
)
def test_hub_model_that_cannot_be_used_is_refused(tmp_path: Path, name: str, lacks: str) -> None:
    with stand_in_hub() as endpoint:
        outcome = resolve(name, tmp_path, endpoint)
    assert outcome.error == "ConfigError"
    assert outcome.message == f"`model.name` is `{name}`, but that hub model has {lacks}"


def test_an_adapter_on_the_hub_is_refused(tmp_path: Path) -> None:
    with stand_in_hub() as endpoint:
        outcome = resolve("org/adapter", tmp_path, endpoint)
    assert "LoRA adapters are not supported" in outcome.message


@pytest.mark.parametrize("offline", ["0", "1"])
def test_hub_out_of_reach_is_an_infrastructure_fault(tmp_path: Path, offline: str) -> None:
    with stand_in_hub() as endpoint:
        pass  # its port answers no more
    outcome = resolve("org/model", tmp_path, endpoint, HF_HUB_OFFLINE=offline)
    assert outcome.error == "InfrastructureError"
    assert outcome.message.endswith("not in the hub's cache, and the hub is out of reach")


def test_ill_hub_is_an_infrastructure_fault(tmp_path: Path) -> None:
    with stand_in_hub() as endpoint:
        outcome = resolve("org/ill", tmp_path, endpoint)
    assert outcome.error == "InfrastructureError"


# --- fingerprints


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text('{"model": 1}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "model.safetensors").write_bytes(bytes(100))
    return folder


def test_fingerprint_names_the_files_that_matter(model: Path) -> None:
    for other in ("README.md", "README.txt", ".hidden.json", "LICENSE", "notes.log", "old.bin"):
        (model / other).write_text("x")
    (model / "checkpoint-5").mkdir()
    (model / "checkpoint-5" / "config.json").write_text("{}")
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tools.jinja").write_text("x")
    assert sorted(model_fingerprint(model)) == [
        "additional_chat_templates/tools.jinja",
        "chat_template.jinja",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]


def test_fingerprint_is_size_and_hash(model: Path) -> None:
    digest = hashlib.blake2b(bytes(100), digest_size=16).hexdigest()
    assert model_fingerprint(model)["model.safetensors"] == f"100:{digest}"


def test_touched_model_is_the_same(model: Path) -> None:
    before = model_fingerprint(model)
    os.utime(model / "model.safetensors", (0, 0))
    assert model_fingerprint(model) == before


def test_changed_template_is_another_model(model: Path) -> None:
    before = model_fingerprint(model)
    (model / "chat_template.jinja").write_text("{{ Messages }}")
    after = model_fingerprint(model)
    assert {name for name in before if before[name] != after[name]} == {"chat_template.jinja"}


def weights_fingerprint(model: Path, weights: bytes) -> str:
    (model / "model.safetensors").write_bytes(weights)
    return model_fingerprint(model)["model.safetensors"]


@pytest.mark.parametrize("size", [4 * MIB - 1, 4 * MIB])
@pytest.mark.parametrize("position", [0.0, 0.37, 1.0])
def test_one_changed_byte_of_a_small_file_is_noticed(
    model: Path, size: int, position: float
) -> None:
    weights = bytearray(size)
    before = weights_fingerprint(model, bytes(weights))
    weights[int((size - 1) * position)] = 1
    assert weights_fingerprint(model, bytes(weights)) != before


@pytest.mark.parametrize("size", [4 * MIB + 1, 9 * MIB + 7])
@pytest.mark.parametrize("position", [0, 64 * KIB - 1, -64 * KIB, -1])
def test_changed_end_of_a_big_file_is_noticed(model: Path, size: int, position: int) -> None:
    weights = bytearray(size)
    before = weights_fingerprint(model, bytes(weights))
    weights[position] = 1
    assert weights_fingerprint(model, bytes(weights)) != before


def test_changed_stretch_longer_than_the_gaps_of_a_big_file_is_noticed(model: Path) -> None:
    size = 9 * MIB
    before = weights_fingerprint(model, bytes(size))
    stretch = size // 63
    for start in range(0, size - stretch, 5 * stretch // 2):
        weights = bytearray(size)
        weights[start : start + stretch] = b"\1" * stretch
        assert weights_fingerprint(model, bytes(weights)) != before


def test_one_weight_between_two_pieces_of_a_big_file_is_missed(model: Path) -> None:
    weights = bytearray(64 * MIB)
    before = weights_fingerprint(model, bytes(weights))
    weights[512 * KIB] = 1
    assert weights_fingerprint(model, bytes(weights)) == before
