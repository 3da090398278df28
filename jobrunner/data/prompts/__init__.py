"""Rows to requests, and tokens to text, with the tokenizer of one model. Knows no files of rows."""
