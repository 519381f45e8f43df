"""Tuning: conversations as rows that teach a model to draft for itself and to fork."""
