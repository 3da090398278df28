"""Attention over the KV pool, one file per backend."""
