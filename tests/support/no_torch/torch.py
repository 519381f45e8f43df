"""Torch: raises if a test of the fast tier imports it."""

raise RuntimeError(
    "the fast tier imports neither torch nor transformers: mark the test with @pytest.mark.torch, "
    "or import them at the top of its file"
)
