"""Demo: a small model that drafts and forks, with its prompts."""
