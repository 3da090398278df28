"""Start workers: on this machine, with Slurm, or with Ray. Knows nothing of rows or models."""
