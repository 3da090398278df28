"""Start workers elsewhere: with Slurm. Knows nothing of rows, models or results."""
