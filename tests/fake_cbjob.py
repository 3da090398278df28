"""`cbjob` with the fake model, for tests with processes of their own. Never imports torch.

What the model does to its process is said in CBJOB_FAKE, as JSON: `step_s` a step takes, `killer`
an index of a row, or "start", and `death` what happens then: the name of a signal, "raise",
"memory", "hang", or "lost": the device does not answer, and exit handlers wait for it.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jobrunner import cli, job
from jobrunner.commands import workers
from jobrunner.config import Settings
from jobrunner.data.prompts import tokenizer
from jobrunner.engine.plan import Plan
from jobrunner.errors import HungError
from jobrunner.opening import Job
from jobrunner.records import Engine
from tests.world import END, fake_engine

COMMAND = (sys.executable, "-m", "tests.fake_cbjob")


def read_fake_model(settings: Settings, folder: Path) -> Any:
    """Stand for what reads a model's configuration."""
    return SimpleNamespace(device="cpu", dtype="float32", max_model_len=2048)


def open_fake_engine(job: Job) -> Engine:
    """An engine as the environment says."""
    said = json.loads(os.environ.get("CBJOB_FAKE", "{}"))
    if said.get("killer") == "start":
        _die(said.get("death", "SIGSEGV"))

    def before(plan: Plan) -> None:
        time.sleep(said.get("step_s", 0.0))
        rows = {chunk.sequence.request.id.index for chunk in plan.chunks}
        if said.get("killer") in rows:
            _die(said["death"])

    return fake_engine(before_plan=before, **said.get("engine", {}))(job)


class FakeTokenizer:
    """What transformers would load of a folder with a `tokenizer.json`, as far as texts need it."""

    is_fast = True
    bos_token_id = None
    eos_token_id = END
    chat_template = None

    def __init__(self, folder: Path) -> None:
        self.backend_tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.added_tokens_decoder = self.backend_tokenizer.get_added_tokens_decoder()

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size())


def save_fake_model(folder: Path) -> Path:
    """A folder with a tokenizer of bytes, which is all that the fake model has of a model."""
    letters = ["<bos>", "<pad>", "<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    spelling = tokenizers.Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    spelling.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    spelling.decoder = decoders.ByteLevel()
    spelling.add_special_tokens(letters[:3])
    folder.mkdir(parents=True)
    spelling.save(str(folder / "tokenizer.json"))
    config = {"vocab_size": len(letters), "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _die(how: str) -> None:
    if how == "raise":
        raise RuntimeError("the fake model broke")
    if how == "memory":
        raise MemoryError("Unable to allocate 9.3 GiB")
    if how == "hang":
        time.sleep(600)
    if how == "lost":
        atexit.register(time.sleep, 600)
        raise HungError("the fake device is lost", hint="run again")
    os.kill(os.getpid(), signal.Signals[how])


def without_torch() -> None:
    """Make every import of torch and transformers in this process fail: both take seconds."""
    for name in ("torch", "transformers"):
        assert name not in sys.modules
        sys.modules[name] = None  # type: ignore[assignment]
    tokenizer._load = FakeTokenizer


def main() -> None:
    """Run the command line with the fake model in place of a real one."""
    without_torch()
    job.run.__kwdefaults__ = {
        **(job.run.__kwdefaults__ or {}),
        "open_engine": open_fake_engine,
        "read_model": read_fake_model,
    }
    workers.PROGRAM = (*COMMAND, "run")
    cli.main()


if __name__ == "__main__":
    main()
