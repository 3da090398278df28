"""Count what the job does and show it. Knows nothing of files of the job or of tensors."""
