"""transformers' `generate`: static batches of prompts of like length, padded on the left.

Each batch decodes as many steps as its longest request; only the tokens asked for are counted.
Shapes: B rows of a batch, T tokens of its longest prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

from serving import Channel, Row, parser, read_rows, serve, timed

BATCH = 32
PAD = 0


def main() -> None:
    channel = Channel()
    options = parser().parse_args()
    import torch
    import transformers

    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        options.model, dtype=getattr(torch, options.dtype)
    ).eval()
    model.generation_config.eos_token_id = None

    def answer(batch: Sequence[Row]) -> list[list[int]]:
        width = max(len(row.prompt_token_ids) for row in batch)
        ids_BT = torch.full((len(batch), width), PAD)
        mask_BT = torch.zeros_like(ids_BT)
        for place, row in enumerate(batch):
            start = width - len(row.prompt_token_ids)
            ids_BT[place, start:] = torch.tensor(row.prompt_token_ids)
            mask_BT[place, start:] = 1
        with torch.inference_mode():
            output_BT = model.generate(
                input_ids=ids_BT,
                attention_mask=mask_BT,
                max_new_tokens=max(row.max_tokens for row in batch),
                do_sample=False,
                pad_token_id=PAD,
            )
        new = output_BT[:, width:].tolist()
        return [tokens[: row.max_tokens] for tokens, row in zip(new, batch, strict=True)]

    def generate(rows: Sequence[Row]) -> list[list[int]]:
        order = sorted(range(len(rows)), key=lambda place: -len(rows[place].prompt_token_ids))
        outputs: list[list[int]] = [[] for _ in rows]
        for start in range(0, len(order), BATCH):
            places = order[start : start + BATCH]
            for place, tokens in zip(places, answer([rows[p] for p in places]), strict=True):
                outputs[place] = tokens
        return outputs

    serve(
        channel,
        read_rows(options.workload),
        timed(generate),
        version=transformers.__version__,
        config=f"batches of {BATCH} sorted by prompt length",
    )


if __name__ == "__main__":
    main()
