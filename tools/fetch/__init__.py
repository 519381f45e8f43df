"""Fetch: copy a bundle from a web server, an object store or a folder, and verify it while it arrives."""
