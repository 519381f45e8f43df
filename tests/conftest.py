"""The suite's surroundings: offline, repeatable, one thread for each process."""

import os

from hypothesis import settings

# Read by torch, tokenizers and huggingface_hub when they are imported, hence here and not in a fixture.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["OMP_NUM_THREADS"] = "1"  # tiny models: more threads cost more than they save

settings.register_profile("suite", deadline=None, derandomize=True)
settings.load_profile("suite")
