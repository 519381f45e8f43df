"""Scheduling: many requests on one engine, from admission to streams."""
