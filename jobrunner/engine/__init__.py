"""Turn requests into tokens: scheduling, KV memory, the step loop. Knows nothing of files."""
