"""Start workers where there are devices, and nothing else."""
