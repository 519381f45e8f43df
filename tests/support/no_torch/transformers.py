"""Skips what imports transformers in the fast tier; fails in a process that a test starts."""

import pytest

pytest.skip(
    "imports transformers: mark a test with @pytest.mark.torch if a process that it starts does",
    allow_module_level=True,
)
