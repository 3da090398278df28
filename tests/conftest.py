"""A tiny model with a tokenizer, saved once for all tests of whole jobs."""

import os
import signal
from pathlib import Path

# read when torch and tokenizers are first imported: tests fork, and share two cores
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# read when triton is first imported: without a GPU its kernels are interpreted
if not Path("/proc/driver/nvidia/version").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest

from tests.properties import register_profiles
from tests.tiny_tokenizers import byte_level

register_profiles()
# who starts tests in the background may have had them ignored, here and in all that tests start
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A random llama with grouped queries whose tokenizer spells bytes; token 2 ends a text."""
    from transformers import AutoTokenizer

    from tests.tiny import tiny_llama

    folder = byte_level(tmp_path_factory.mktemp("models") / "tiny")
    size = len(AutoTokenizer.from_pretrained(folder))
    return tiny_llama(folder, vocab_size=size, eos_token_id=2, max_position_embeddings=2048)
