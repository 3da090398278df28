"""Find the folder that `model.name` means, fingerprint it and read its JSON. Knows no weights."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

from jobrunner.errors import ConfigError, InfrastructureError, JobError, ModelError
from jobrunner.user_cache import user_cache_folder

DEMO_NAME = "demo"
DEMO_FOLDER_NAME = "smollm2-135m-instruct"
DEMO_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
# everything a decoder and its tokenizer load from; pickles (.bin, .pt) can run code and stay out
_HUB_WANTED = ("*.json", "*.jinja", "*.model", "*.txt", "*.safetensors")
# weights stored a second time, for other programs
_HUB_UNWANTED = ("*/*.safetensors", "consolidated*.safetensors")

_FINGERPRINTED = (".json", ".jinja", ".model", ".txt", ".safetensors")
_WHOLE_BYTES = 4 * 2**20
_PIECES = 64
_PIECE_BYTES = 64 * 2**10


def demo_model_folder() -> Path:
    """Where `scripts/demo_model` puts the demo model, there or not."""
    return user_cache_folder() / "models" / DEMO_FOLDER_NAME


def missing_demo_files(folder: Path) -> list[str]:
    """Name the files that a prepared demo model has and `folder` lacks."""
    return [name for name in DEMO_FILES if not (folder / name).is_file()]


def resolve_model(name: str, base: Path, revision: str | None = None) -> Path:
    """Turn `model.name` into a local folder: `demo`, a folder relative to `base`, or a hub id.

    A folder wins over a hub id of the same name; a hub model is downloaded into the hub's own
    cache, or taken from there. `revision` is a branch, tag or commit of a hub model. Raises
    ConfigError when the name leads to no usable model and InfrastructureError when the hub or
    the disk fails.
    """
    folder = base / os.path.expanduser(name)
    on_hub = name != DEMO_NAME and _HUB_ID.fullmatch(name) and not folder.exists()
    if revision is not None and not on_hub:
        raise ConfigError(
            f"`model.revision` is `{revision}`, but `model.name` `{name}` is not on a hub",
            hint="revisions belong to hub models `org/name`: leave the key out",
        )
    if name == DEMO_NAME:
        return _demo_model()
    if on_hub:
        return _hub_model(name, folder, revision)
    if folder.is_dir():
        return _local_model(name, folder)
    if folder.suffix == ".gguf":
        raise _gguf_error(name)
    raise ConfigError(
        f"`model.name` is `{name}`, but there is no folder `{folder}`",
        hint="give a folder that holds config.json (relative to the job file), "
        f"a hub id `org/name`, or `{DEMO_NAME}`",
    )


def _demo_model() -> Path:
    folder = demo_model_folder()
    missing = missing_demo_files(folder)
    if missing:
        raise ConfigError(
            f"the demo model is not prepared: `{folder}` lacks {', '.join(missing)}",
            hint="run `scripts/demo_model` once (scripts/quickstart does it)",
        )
    return folder


def _local_model(name: str, folder: Path) -> Path:
    _check_kind(name, folder)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"`model.name` is `{name}`, but the folder `{folder}` lacks config.json",
            hint="point it at a folder written by transformers' `save_pretrained`",
        )
    return folder


def _check_kind(name: str, folder: Path) -> None:
    """Refuse folders that hold something else than a whole model in the transformers format."""
    if (folder / "adapter_config.json").is_file():
        raise ConfigError(
            f"`model.name` is `{name}`, which holds an adapter; LoRA adapters are not supported",
            hint="merge it into its base model first: PEFT's `merge_and_unload`, then "
            "`save_pretrained`",
        )
    if not (folder / "config.json").is_file() and any(folder.glob("*.gguf")):
        raise _gguf_error(name)


def _gguf_error(name: str) -> ConfigError:
    return ConfigError(
        f"`model.name` is `{name}`, which is in GGUF",
        hint="take the model in the transformers format",
    )


def _hub_model(name: str, folder: Path, revision: str | None) -> Path:
    # imported here: it costs half a second that a local model must not pay
    from huggingface_hub import snapshot_download

    try:
        snapshot = Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=list(_HUB_WANTED),
                ignore_patterns=list(_HUB_UNWANTED),
            )
        )
    # the hub's client lets errors of its HTTP library through, and that library has changed
    except Exception as failure:
        raise _hub_error(name, folder, revision, failure) from failure
    _check_kind(name, snapshot)
    if not (snapshot / "config.json").is_file():
        raise ConfigError(
            f"`model.name` is `{name}`, but that hub model has no config.json",
            hint="take a model in the transformers format",
        )
    if not any(snapshot.glob("*.safetensors")):
        raise ConfigError(
            f"`model.name` is `{name}`, but that hub model has no safetensors weights",
            hint="take a model with .safetensors files: pickled weights can run code",
        )
    return snapshot


def _hub_error(name: str, folder: Path, revision: str | None, failure: Exception) -> JobError:
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    # gated is a kind of not found: it has to be asked first
    if isinstance(failure, GatedRepoError):
        return ConfigError(
            f"`model.name` is `{name}`, and that hub model asks for its terms to be accepted",
            hint="accept them on the model's page and log in with `hf auth login`",
        )
    if isinstance(failure, RepositoryNotFoundError):
        return ConfigError(
            f"`model.name` is `{name}`, but there is no folder `{folder}` and no such hub model",
            hint="check the spelling; a private model needs `hf auth login`",
        )
    if isinstance(failure, RevisionNotFoundError):
        return ConfigError(
            f"`model.revision` is `{revision}`, but the hub model `{name}` has no such revision",
            hint="give a branch, a tag or a commit of it",
        )
    if isinstance(failure, LocalEntryNotFoundError):
        return InfrastructureError(
            f"`model.name` is `{name}`: not in the hub's cache, and the hub is out of reach",
            hint="check the network and HF_HUB_OFFLINE, or give the folder of a copy",
        )
    return InfrastructureError(
        f"`model.name` is `{name}`: the download failed: {type(failure).__name__}: {failure}",
        hint="run again: what was downloaded so far is kept",
    )


def read_json(path: Path) -> dict[str, Any]:
    """Read a file of a model's folder; one that is not there is empty. Raises ModelError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot read `{path}`: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"cannot read `{path}`: it is no JSON object")
    return content


def model_fingerprint(folder: Path) -> dict[str, str]:
    """Map each file that decides what the model says to `size:hash`; times play no part.

    The hash covers the whole of a file up to 4 MiB, else 64 evenly spaced pieces of 64 KiB, the
    first and the last among them: reading all of a big checkpoint would delay every start. A
    retrained checkpoint, where every weight moved, is never missed; a single weight changed
    between two pieces is. Raises InfrastructureError when a file cannot be read.
    """
    try:
        files = [*folder.iterdir(), *(folder / "additional_chat_templates").glob("*")]
        return {
            path.relative_to(folder).as_posix(): _file_fingerprint(path)
            for path in sorted(files)
            if _decides_output(path)
        }
    except OSError as failure:
        raise InfrastructureError(
            f"cannot read the model in `{folder}`: {failure}",
            hint="check the files' permissions and their disk, then run again",
        ) from failure


def _decides_output(path: Path) -> bool:
    return (
        path.suffix in _FINGERPRINTED
        and not path.name.startswith(".")
        and not path.name.upper().startswith("README")
        and path.is_file()
    )


def _file_fingerprint(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    size = path.stat().st_size
    with path.open("rb") as file:
        for offset, length in _pieces(size):
            file.seek(offset)
            digest.update(file.read(length))
    return f"{size}:{digest.hexdigest()}"


def _pieces(size: int) -> list[tuple[int, int]]:
    """Offset and length, in bytes, of the parts of a file that are hashed."""
    if size <= _WHOLE_BYTES:
        return [(0, size)]
    last = size - _PIECE_BYTES
    return [(last * piece // (_PIECES - 1), _PIECE_BYTES) for piece in range(_PIECES)]
