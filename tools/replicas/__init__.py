"""Replicas of a service in a cluster of Ray Serve."""
