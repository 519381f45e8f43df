"""Training: drafts and forks are taught with the own answers of a model, and their acceptance is measured."""
