"""transformers' continuous batching, by the manager that `generate_batch` uses.

`generate_batch` itself gives all requests one length. The settings are the best of several that
were tried on 32 requests.
"""

from __future__ import annotations

from collections.abc import Sequence

from serving import Channel, Row, parser, read_rows, serve, timed

BATCH_TOKENS, REQUESTS, BLOCKS = 512, 16, 64
NO_END = -1


def main() -> None:
    channel = Channel()
    options = parser().parse_args()
    import torch
    import transformers

    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        options.model, dtype=getattr(torch, options.dtype), attn_implementation="sdpa"
    ).eval()
    batching = transformers.ContinuousBatchingConfig(
        max_batch_tokens=BATCH_TOKENS, num_blocks=BLOCKS, max_requests_per_batch=REQUESTS
    )

    def generate(rows: Sequence[Row]) -> list[list[int]]:
        generation = transformers.GenerationConfig(
            do_sample=False,
            eos_token_id=NO_END,
            pad_token_id=0,
            max_new_tokens=max(row.max_tokens for row in rows),
        )
        done: dict[str, list[int]] = {}
        batches = model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=batching
        )
        with torch.inference_mode(), batches as manager:
            names = [
                manager.add_request(
                    list(row.prompt_token_ids), max_new_tokens=row.max_tokens, eos_token_id=NO_END
                )
                for row in rows
            ]
            while len(done) < len(rows):
                result = manager.get_result(timeout=1)
                if result is None:
                    if not manager.is_running():
                        raise SystemExit("its generation thread has died")
                elif result.is_finished():
                    if result.error:
                        raise SystemExit(result.error)
                    done[result.request_id] = list(result.generated_tokens)
        return [done[name] for name in names]

    config = f"{BATCH_TOKENS} tokens a step, {REQUESTS} requests, {BLOCKS} blocks"
    rows = read_rows(options.workload)
    serve(channel, rows, timed(generate), version=transformers.__version__, config=config)


if __name__ == "__main__":
    main()
