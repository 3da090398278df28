"""OpenVINO GenAI's continuous batching on the CPU: one call with every request.

--exported names the model as `optimum-cli export openvino` writes it.
"""

from __future__ import annotations

from collections.abc import Sequence

from serving import Channel, Row, parser, read_rows, serve, timed

PRECISION = {"float32": "f32", "bfloat16": "bf16"}
# twice its default
STEP_TOKENS = 512
# GB: all requests of the workloads side by side need less
CACHE = 2


def main() -> None:
    channel = Channel()
    options = parser()
    options.add_argument("--exported", required=True)
    chosen = options.parse_args()
    import numpy as np
    import openvino
    import openvino_genai

    rows = read_rows(chosen.workload)
    scheduling = openvino_genai.SchedulerConfig()
    scheduling.cache_size = CACHE
    scheduling.max_num_batched_tokens = STEP_TOKENS
    # its process lives on between the runs: with the cache on, a second run would skip the prompts
    scheduling.enable_prefix_caching = False
    properties = {
        "INFERENCE_NUM_THREADS": chosen.threads,
        "INFERENCE_PRECISION_HINT": PRECISION[chosen.dtype],
        "PERFORMANCE_HINT": "THROUGHPUT",
        "NUM_STREAMS": 1,
    }
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        chosen.exported, scheduling, "CPU", properties
    )

    def wanted(row: Row) -> object:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = row.max_tokens
        config.ignore_eos = True
        config.do_sample = False
        return config

    def generate(rows: Sequence[Row]) -> list[list[int]]:
        prompts = [openvino.Tensor(np.array([row.prompt_token_ids], np.int64)) for row in rows]
        results = pipeline.generate(prompts, [wanted(row) for row in rows])
        return [list(result.m_generation_ids[0]) for result in results]

    config = f"{STEP_TOKENS} tokens a step, prefix cache off, KV {CACHE} GB"
    version = openvino_genai.__version__
    serve(channel, rows, timed(generate), version=version, config=config)


if __name__ == "__main__":
    main()
