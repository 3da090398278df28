"""What became of rows: parts, and the result files made of them. Knows no prompts."""
