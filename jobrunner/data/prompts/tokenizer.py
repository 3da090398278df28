"""The tokenizer of one model folder: text to ids, and what ids mean. Knows nothing of rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jobrunner.data.models import read_json
from jobrunner.data.prompts.literal import Literal
from jobrunner.errors import ModelError


class Tokenizer:
    """Encodes prompts. `end_ids` end a text; ids below `vocabulary` are known to the model.

    `loaded` is transformers' own. Raises ModelError where the folder has no usable tokenizer.
    """

    def __init__(self, folder: Path) -> None:
        self.loaded = _load(folder)
        self._backend = self.loaded.backend_tokenizer
        self.literal = Literal(self._backend)
        config = read_json(folder / "config.json")
        self.vocabulary = _vocabulary(config, len(self.loaded))
        self.end_ids = _end_ids(folder, config, self.loaded)
        self._may_exceed = _largest_id(self._backend) >= self.vocabulary

    def encode(self, texts: Sequence[str], *, whole: bool) -> list[list[int]]:
        """Token ids of texts; `whole` ones get what the tokenizer adds, as a BOS.

        Raises what tokenizers raises: a bare Exception.
        """
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=whole)
        return [encoding.ids for encoding in encodings]

    def boundaries(self, text: str) -> list[int]:
        """Where the tokens of a text end, in characters."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        return [end for _, end in encoding.offsets]

    def without_second_bos(self, ids: list[int]) -> list[int]:
        """Drop the BOS that the tokenizer added in front of one that was written."""
        bos = self.loaded.bos_token_id
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids

    def unknown_to_model(self, ids: Sequence[int]) -> int | None:
        """An id that the tokenizer has and the model has not."""
        largest = max(ids) if self._may_exceed else -1
        return largest if largest >= self.vocabulary else None

    def visible(self, ids: Sequence[int]) -> str:
        """Decode a prompt, special tokens and all."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=False)
        return text


def _load(folder: Path) -> Any:
    # loaded here, not at import: `cbjob --help` must not wait for it
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise ModelError(
            f"cannot load the tokenizer in `{folder}`: {error}",
            hint="the folder needs `tokenizer.json` and `tokenizer_config.json`",
        ) from error
    if not tokenizer.is_fast:
        raise ModelError(
            f"the tokenizer in `{folder}` is {type(tokenizer).__name__}, not a fast one",
            hint="the folder needs a `tokenizer.json`",
        )
    # some files ask for them; a prompt is never cut or padded without a word
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def _vocabulary(config: dict[str, Any], tokens: int) -> int:
    text = config.get("text_config")
    size = config.get("vocab_size") or (text.get("vocab_size") if isinstance(text, dict) else None)
    return size if isinstance(size, int) else tokens


def _largest_id(backend: Any) -> int:
    ids = [*backend.get_vocab(with_added_tokens=True).values()]
    return max(ids, default=-1)


def _end_ids(folder: Path, config: dict[str, Any], tokenizer: Any) -> frozenset[int]:
    """Every id that ends a text: of the generation config, the config and the tokenizer."""
    generation = read_json(folder / "generation_config.json")
    ids: set[int] = set()
    for value in (
        generation.get("eos_token_id"),
        config.get("eos_token_id"),
        tokenizer.eos_token_id,
    ):
        if value is not None:
            ids.update(value if isinstance(value, list) else [value])
    return frozenset(ids)
