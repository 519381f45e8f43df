"""Scheduling: many requests on one engine, from their admission to the stream of what they write."""
