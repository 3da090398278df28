"""What each key of a job file means, in a line, for the template and for editors.

`EXAMPLES` are values in TOML for keys that have no default. Knows nothing of types.
"""

from __future__ import annotations

from collections.abc import Mapping

TABLES_HELP = {
    "job": "the job as a whole",
    "input": "the rows, and what makes a prompt of each",
    "output": "the run directory and the results in it",
    "model": "the model and where it runs",
    "generation": "how texts are generated; a row may bring its own values (`input.params`)",
    "batching": 'the batch on the device; "auto" fits the device',
    "checkpoint": "how much work a kill may cost",
    "errors": "when error rows stop the job (exit 4, it can go on)",
    "progress": "what is shown and logged while the job runs",
    "workers": "the processes that share the job on this machine",
}

KEYS: Mapping[str, Mapping[str, str]] = {
    "job": {
        "name": "shown in the log",
        "seed": "keys the random draws of every row",
        "price_per_gpu_hour": "adds the cost to the summary, in any currency",
    },
    "input": {
        "path": "a file, a folder or a glob, relative to this file; or a URL such as s3://...",
        "dataset": "instead of `path`: a hub id, a local folder or one saved to disk",
        "split": "of the dataset",
        "streaming": "read the dataset as it is downloaded",
        "format": '"auto" goes by the names of files; "openai" is a batch file',
        "prompt": "the column with the text of the prompt",
        "messages": "instead of `prompt`: the column with a list of messages",
        "template": "instead of `prompt`: a template over columns (jinja)",
        "token_ids": "instead of `prompt`: the column with token ids, used as they are",
        "system": "a system message put in front",
        "chat": 'whether prompts go through the chat template; "auto" if the model has one',
        "chat_template": "a file with another chat template than the model's",
        "chat_template_kwargs": "what the chat template is given besides the messages",
        "tools": "the column with tools for the chat template",
        "prefill": "the beginning of every answer, a template over columns",
        "id": "the column whose values name the rows: unique, never null",
        "keep": "columns to carry over into the results",
        "params": "a struct column, or columns, with a row's own values of [generation]",
        "priority": "the column with a row's priority, 0 is the highest",
        "arrival": "the column with the seconds after which a row is there, for replays",
        "too_long": "what becomes of a prompt that is too long for the model",
    },
    "output": {
        "path": "the run directory; the same job goes on in the same folder",
        "format": 'of the result files; "auto" is parquet, and openai for openai',
        "columns": 'result columns beside the usual: "prompt_text", "token_ids", "chunks"',
        "logprobs": "log-probabilities of each token and of so many of the likeliest",
        "compression": "of Parquet result files",
    },
    "model": {
        "name": 'a folder, a hub id such as "Qwen/Qwen2.5-0.5B-Instruct", or "demo"',
        "revision": "a branch, tag or commit of the hub model",
        "dtype": "of weights, activations and KV",
        "device": '"auto" takes a GPU where there is one',
        "threads": "threads of a forward pass on a CPU",
        "attention": "kernels: compiled for the CPU; torch: anywhere; auto: what is faster",
        "max_model_len": "the most tokens of prompt and output; auto: what the model can",
    },
    "generation": {
        "max_new_tokens": "a text ends there at the latest",
        "min_new_tokens": "a text does not end before",
        "temperature": "0 takes the likeliest token",
        "top_p": "draw from the likeliest tokens with this much probability together",
        "top_k": "draw from so many of the likeliest tokens; 0 is off",
        "min_p": "leave out tokens below this share of the likeliest one; 0 is off",
        "repetition_penalty": "divides the scores of tokens that were there; 1 is off",
        "presence_penalty": "taken from the scores of generated tokens, once",
        "frequency_penalty": "taken from the scores of generated tokens, each time",
        "stop": "texts that end the answer, and are not part of it",
        "stop_token_ids": "tokens that end the answer",
        "stop_on_repetition": "end a text whose last so many tokens repeat themselves; 0 is off",
        "ignore_eos": "the model's end token does not end the text",
        "n": "answers per row",
        "seed": "draw alike for every row; without it each row has its own draws",
        "use_model_defaults": "take what is not set here from generation_config.json",
    },
    "batching": {
        "max_batch_size": "the most rows in one step",
        "token_budget": "the most tokens in one step",
        "chunk_size": "the most prompt tokens of a row in one step",
        "block_size": "tokens in a block of KV memory",
        "kv_memory": 'such as "8GiB"',
        "prefix_cache": "compute the shared beginnings of prompts once",
        "lookahead": "how many waiting rows are looked at",
        "policy": '"static" and "dynamic" batches start and leave together',
        "order": "in which waiting rows start: "
        "auto starts long ones early, mixes kinds of work and keeps equal prefixes together",
        "reserve": "the share of KV memory that predictions leave free",
        "preemption": "keep what a row that gives way has computed in host memory, or recompute it",
        "swap_memory": "host memory for rows that gave way",
        "not_preemptible": "priorities whose rows never give way",
        "starvation_limit": "a row that has waited for so long goes before all priorities",
        "preferred_batch_size": "gather so many rows before they start, dynamic or continuous: "
        "needs max_queue_delay",
        "max_queue_delay": "let no row wait for longer than this to be gathered",
        "schedule_every": "steps between decisions about the batch size",
    },
    "checkpoint": {
        "every": "how often finished rows and rows in flight are saved",
        "grace": "after a signal there is this much time to save",
        "part_rows": "finished rows are saved at the latest when there are so many",
    },
    "errors": {
        "max_rate": "the most that may be errors, once 1,000 rows are finished",
        "max_count": "the most error rows",
    },
    "progress": {
        "every": "between lines of the log",
        "style": '"auto" is rich on a terminal, else plain',
        "metrics": "write metrics.jsonl into the run directory",
    },
    "workers": {
        "engine": "what starts them",
        "count": '"auto" is one for each GPU, or one on the CPU',
        "devices": 'GPUs such as "0" or sets of cores such as "0-3", one for each worker',
    },
}

EXAMPLES: Mapping[str, str] = {
    "job.price_per_gpu_hour": "2.5",
    "input.path": '"data/*.parquet"',
    "input.dataset": '"openai/gsm8k"',
    "input.prompt": '"prompt"',
    "input.messages": '"messages"',
    "input.template": '"Translate into French: {{ text }}"',
    "input.token_ids": '"token_ids"',
    "input.system": '"Answer in one sentence."',
    "input.chat_template": '"template.jinja"',
    "input.tools": '"tools"',
    "input.prefill": '"Answer: "',
    "input.id": '"id"',
    "input.priority": '"priority"',
    "input.arrival": '"arrival_s"',
    "output.path": '"runs/first"',
    "output.logprobs": "0",
    "model.name": '"demo"',
    "model.revision": '"main"',
    "generation.seed": "0",
    "batching.preferred_batch_size": "8",
    "errors.max_count": "100",
    "workers.devices": '["0", "1"]',
}
# what every job has to say
REQUIRED = ("input.path", "input.prompt", "output.path", "model.name")
