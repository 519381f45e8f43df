"""Demo: a small model trained for self-speculative decoding and parallel threads, with its prompts."""
