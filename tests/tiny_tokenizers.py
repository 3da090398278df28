"""Tiny real tokenizers for tests, built by hand and saved as a model folder would hold them."""

from __future__ import annotations

from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'bad' %}{{ raise_exception('no role named bad here') }}{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BOS_TEMPLATE = "{{ bos_token }}" + CHAT_TEMPLATE

_SPECIAL = ["<|bos|>", "<|im_start|>", "<|im_end|>"]
# whole words as one token each; everything else is spelled in bytes or characters
_WORDS = ["ABC", "DEF", "Hello", "world", "Paris"]


def byte_level(folder: Path, *, template: str | None = CHAT_TEMPLATE) -> Path:
    """Save a byte-level BPE tokenizer that adds no BOS; ids 0 to 2 are special, 2 ends a turn."""
    tokenizer = _byte_level()
    return _save(tokenizer, folder, template)


def double_bos(folder: Path, *, template: str | None = BOS_TEMPLATE) -> Path:
    """Save the same tokenizer with a post-processor that adds the BOS, as its template does."""
    tokenizer = _byte_level()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", 0)]
    )
    return _save(tokenizer, folder, template)


def byte_fallback(folder: Path, *, template: str | None = CHAT_TEMPLATE) -> Path:
    """Save a llama-like BPE tokenizer: `▁` for spaces, `<0xF0>` for bytes of unknown text."""
    alphabet = ["▁", *(chr(code) for code in range(33, 127)), "é", "\n"]
    spelled = [*_SPECIAL, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *alphabet]
    vocabulary, merges = _with_words(spelled, [*_WORDS, *("▁" + word for word in _WORDS)])
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return _save(tokenizer, folder, template)


def metaspace(folder: Path, *, template: str | None = CHAT_TEMPLATE) -> Path:
    """Save a newer llama-like BPE tokenizer: only the very first word gets a `▁` in front."""
    alphabet = ["▁", *(chr(code) for code in range(33, 127)), "é", "\n"]
    vocabulary, merges = _with_words([*_SPECIAL, "<unk>", *alphabet], ["▁" + w for w in _WORDS])
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    return _save(tokenizer, folder, template)


def unigram(folder: Path, *, template: str | None = CHAT_TEMPLATE) -> Path:
    """Save a unigram tokenizer whose own model knows the special tokens' spelling."""
    alphabet = ["▁", *(chr(code) for code in range(33, 127)), "\n"]
    pieces = [("<unk>", 0.0), *((token, -1.0) for token in _SPECIAL)]
    pieces += [*((letter, -9.0) for letter in alphabet), *(("▁" + word, -3.0) for word in _WORDS)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    return _save(tokenizer, folder, template)


def eager_specials(folder: Path, *, template: str | None = CHAT_TEMPLATE) -> Path:
    """Save a byte-level tokenizer whose special tokens swallow the white space around them."""
    tokenizer = _byte_level()
    tokenizer.add_special_tokens(
        [AddedToken(_SPECIAL[1], lstrip=True), AddedToken(_SPECIAL[2], rstrip=True)]
    )
    return _save(tokenizer, folder, template)


def _byte_level() -> Tokenizer:
    spelled = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words = [*_WORDS, *("Ġ" + word for word in _WORDS)]
    vocabulary, merges = _with_words(spelled, words)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _with_words(
    spelled: list[str], words: list[str]
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Add the words, and what leads to them letter by letter, to a vocabulary."""
    vocabulary = {token: index for index, token in enumerate(spelled)}
    merges: list[tuple[str, str]] = []
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocabulary:
                vocabulary[word[:end]] = len(vocabulary)
                merges.append((word[: end - 1], word[end - 1]))
    return vocabulary, merges


def _save(tokenizer: Tokenizer, folder: Path, template: str | None) -> Path:
    tokenizer.add_special_tokens(_SPECIAL)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|bos|>", eos_token="<|im_end|>"
    )
    fast.chat_template = template
    fast.save_pretrained(folder)
    return folder
