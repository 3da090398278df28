"""Small jobs drawn at random, run, interrupted and checked. See scripts/fuzz."""
