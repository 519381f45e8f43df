"""Chat benchmark: what drafts gain on chat prompts, by kind of prompt, and what other runtimes need for the same prompts."""
