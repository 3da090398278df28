"""What a model folder's weights are, read from their headers alone. Knows nothing of tensors."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobrunner.errors import ModelError

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_MOST_HEADER_BYTES = 100 * 2**20
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


@dataclass(frozen=True, slots=True)
class Weights:
    """`parameters` counts the elements of all tensors, `wide` those that take the chosen dtype,
    `experts` those of which a token passes only a part."""

    file_bytes: int
    parameters: int
    wide: int
    experts: int

    def bytes_as(self, element_bytes: int) -> int:
        """Memory of the weights once loaded; what is quantised or whole stays as it is."""
        return self.wide * element_bytes + (self.parameters - self.wide)


def read_weights(folder: Path) -> Weights:
    """Read the headers of a checkpoint; ModelError where it is not complete or not safe."""
    file_bytes = parameters = wide = experts = 0
    for path in _weight_files(folder):
        try:
            header = _header(path)
            file_bytes += path.stat().st_size
            for name, tensor in header.items():
                if name != "__metadata__":
                    count = math.prod(tensor["shape"])
                    parameters += count
                    wide += count if tensor["dtype"] in _FLOATS else 0
                    experts += count if ".experts." in name else 0
        except (OSError, ValueError, TypeError, KeyError, struct.error) as error:
            raise ModelError(
                f"the weights `{path}` cannot be read: {error}",
                hint="check that the folder is complete",
            ) from error
    return Weights(file_bytes, parameters, wide, experts)


def _weight_files(folder: Path) -> list[Path]:
    """The files that transformers would load."""
    index = folder / _INDEX
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    if not index.is_file():
        raise _no_weights(folder)
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(
            f"`{index}` cannot be read: {error}", hint="check that the folder is complete"
        ) from error
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise ModelError(
            f"`{folder}` lacks {len(absent)} of {len(names)} files of weights, "
            f"`{absent[0]}` among them",
            hint="check that the folder is complete",
        )
    return [folder / name for name in names]


def _no_weights(folder: Path) -> ModelError:
    pickled = [*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")]
    if pickled:
        return ModelError(
            f"`{folder}` holds no safetensors weights, only pickled ones (`{pickled[0].name}`)",
            hint="pickles can run code: load them where you trust them and write them again with "
            "`save_pretrained`",
        )
    if any(folder.glob("*.gguf")):
        return ModelError(
            f"`{folder}` holds no safetensors weights, only GGUF",
            hint="take the model in the transformers format",
        )
    return ModelError(
        f"`{folder}` holds no safetensors weights",
        hint=f"it must hold {_SINGLE}, or {_INDEX} and the files that it names",
    )


def _header(path: Path) -> dict[str, dict[str, Any]]:
    """The header of a safetensors file: eight bytes of length, then JSON."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > _MOST_HEADER_BYTES:
            raise ValueError(f"its header says it has {length:,} bytes")
        return dict(json.loads(file.read(length)))
