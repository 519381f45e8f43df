"""Attack: a campaign of mutated bundles, hostile requests and load that runs until a time limit."""
