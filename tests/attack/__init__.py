"""Attack: a campaign of mutated bundles, swaps, kills, hostile requests and load that runs until a time limit."""
