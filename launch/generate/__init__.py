"""`launch generate`: requests from a JSONL file, answers to another, resumable."""
