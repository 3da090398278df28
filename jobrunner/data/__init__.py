"""Rows in, results out, exactly once. Knows nothing of models' tensors or the console."""
