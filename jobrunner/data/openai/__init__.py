"""OpenAI's batch files: their requests in our words, our outcomes as their lines."""
