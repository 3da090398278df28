"""Say where results come from, for their files.

Never anything of the environment or the clock: the same job writes the same files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from jobrunner.config import Settings

# files of a model's folder that decide about its tokens
_TOKENIZER_WORDS = ("token", "vocab", "merges", "chat_template")


def provenance_of(
    version: str,
    settings: Settings,
    fingerprint: Mapping[str, Any],
    generation: Mapping[str, object],
) -> dict[str, object]:
    """Name version, model, fingerprints, settings and the values that decide about requests.

    `fingerprint` is the job's, as it is remembered; `generation` what else holds for every row once
    the model is known: its chat template, its end ids, the generation values in effect.
    """
    model = {key: value for key, value in fingerprint.items() if key.startswith("model file ")}
    tokenizer = {k: v for k, v in model.items() if any(word in k for word in _TOKENIZER_WORDS)}
    shards = {key: value for key, value in fingerprint.items() if key.startswith("input ")}
    return {
        "version": version,
        "model": settings.model.name,
        "fingerprints": {
            "job": _digest(fingerprint),
            "input": _digest(shards),
            "model": _digest(model),
            "tokenizer": _digest(tokenizer),
        },
        "settings": settings.model_dump(mode="json", exclude={"folder"}),
        "generation": dict(generation),
    }


def _digest(values: Mapping[str, Any]) -> str:
    spelled = json.dumps(values, sort_keys=True, default=list)
    return hashlib.blake2b(spelled.encode(), digest_size=16).hexdigest()
