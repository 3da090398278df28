"""Build kernels for GPUs that are not here: build_kernels [all|few], one JSON line per binary.

A process of its own, because triton either interprets its kernels or builds them.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from jobrunner.engine.attention import triton_kernels as kernels
from jobrunner.engine.attention.triton_tiles import DecodeTiles, decode_tiles, padded

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
HEAD_WIDTHS = (64, 80, 96, 128, 256)
ARCHITECTURES = (80, 90)
# fastest and most used first
FEW_BLOCK_SIZES, ALL_BLOCK_SIZES = (16,), (16, 32, 64)


@dataclass(frozen=True)
class Build:
    """One kernel for one number format, head and architecture."""

    kernel: str
    dtype: str
    width: int
    architecture: int
    variant: str
    constants: dict[str, Any]
    warps: int = 4
    stages: int = 2

    @property
    def label(self) -> str:
        return f"{self.kernel} {self.dtype} {self.width} sm_{self.architecture} {self.variant}"


def builds(grid: str) -> Iterator[Build]:
    """Every head width and architecture; `all` crosses them with number formats and variants."""
    for architecture in ARCHITECTURES:
        for width in HEAD_WIDTHS:
            for dtype in TYPES if grid == "all" else ["bf16"]:
                yield from _builds_of(dtype, width, architecture, grid == "all")
        if grid == "few":
            yield from _builds_of("fp16", 64, architecture, False)
            yield from _builds_of("fp32", 64, architecture, False)


def _builds_of(dtype: str, width: int, architecture: int, every: bool) -> Iterator[Build]:
    tiles = decode_tiles(4, width, width, TYPES[dtype].itemsize)
    variants = [("split", 8, 0, 0, False)]
    if every:
        variants += [("whole", 1, 0, 0, False), ("chunk", 4, 0, 512, False)]
    # what is rare, once for each architecture
    if every or width == 128:
        variants.append(("window softcap sinks", 8, 128, 0, True))
    for name, splits, window, chunk, extras in variants:
        for size in ALL_BLOCK_SIZES if every else FEW_BLOCK_SIZES:
            yield Build(
                "decode_kernel",
                dtype,
                width,
                architecture,
                f"{name} block {size}",
                _decode_constants(tiles, width, size, splits, window, chunk, extras),
                tiles.warps,
                tiles.stages,
            )
        if splits > 1 and (every or width in (80, 256)):
            yield Build(
                "reduce_kernel",
                dtype,
                width,
                architecture,
                name,
                {
                    "HEADS": 8,
                    "VALUE_WIDTH": width,
                    "TOKENS": tiles.tokens,
                    "PADDED_VALUE": tiles.value_width,
                    "SPLITS": splits,
                    "WINDOW": window,
                    "CHUNK": chunk,
                    "SINKS": extras,
                },
            )
    write = {
        "HEADS": 2,
        "KEY_WIDTH": width,
        "VALUE_WIDTH": width,
        "BLOCK_SIZE": 16,
        "PADDED_HEADS": 2,
        "PADDED_KEY": padded(width),
        "PADDED_VALUE": padded(width),
    }
    if every or width in (80, 256):
        yield Build("write_kernel", dtype, width, architecture, "", write)
    if width == HEAD_WIDTHS[0]:
        for gather in (True, False):
            copy = {"COPIED": 2048, "GATHER": gather}
            variant = "gather" if gather else "scatter"
            yield Build("copy_blocks_kernel", dtype, width, architecture, variant, copy)


def _decode_constants(
    tiles: DecodeTiles, width: int, size: int, splits: int, window: int, chunk: int, extras: bool
) -> dict[str, Any]:
    return {
        "HEADS": 8,
        "GROUP": 4,
        "KEY_WIDTH": width,
        "VALUE_WIDTH": width,
        "BLOCK_SIZE": size,
        "QUERIES": tiles.queries,
        "TOKENS": tiles.tokens,
        "PADDED_KEY": tiles.key_width,
        "PADDED_VALUE": tiles.value_width,
        "SPLITS": splits,
        "WINDOW": window,
        "CHUNK": chunk,
        "SOFTCAP": extras,
        "SINKS": extras,
    }


def signature(build: Build) -> dict[str, str]:
    """The types that the launch of a kernel passes."""
    pointers = {
        "part_ptr": "*fp32",
        "top_ptr": "*fp32",
        "sum_ptr": "*fp32",
        "table_ptr": "*i32",
        "rows_ptr": "*i64",
        "lengths_ptr": "*i64",
        "slots_ptr": "*i64",
        "blocks_ptr": "*i64",
        "scale": "fp32",
        "softcap": "fp32",
    }
    kernel = getattr(kernels, build.kernel)
    types = {}
    for name in inspect.signature(kernel.fn).parameters:
        if name in build.constants:
            types[name] = "constexpr"
        elif name in pointers:
            types[name] = pointers[name]
        else:
            types[name] = f"*{build.dtype}" if name.endswith("_ptr") else "i32"
    return types


def build_one(build: Build) -> dict[str, Any]:
    """Build one; return what its binary is and takes."""
    kernel = getattr(kernels, build.kernel)
    # as at a launch, where pointers and strides are divisible by 16
    divisible = {
        (index,): [["tt.divisibility", 16]]
        for index, (name, kind) in enumerate(signature(build).items())
        if kind != "constexpr" and not kind.startswith("fp") and name != "table_row"
    }
    source = ASTSource(
        fn=kernel, signature=signature(build), constexprs=build.constants, attrs=divisible
    )
    built = triton.compile(
        source,
        target=GPUTarget("cuda", build.architecture, 32),
        options={"num_warps": build.warps, "num_stages": build.stages},
    )
    return {
        "label": build.label,
        "architecture": build.architecture,
        "cubin_bytes": len(built.asm["cubin"]),
        "shared_bytes": built.metadata.shared,
        "loads": built.asm["ptx"].count("ld.global"),
        "wide_loads": built.asm["ptx"].count(".v4.b32"),
        "async_copies": built.asm["ptx"].count("cp.async.cg"),
    }


def main(grid: str) -> None:
    for build in builds(grid):
        print(json.dumps(build_one(build)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
