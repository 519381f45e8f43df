"""Model sources: bundles tokenize conversations as training does, and need only their backend to be measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from spaceport.graphs.contract.manifest import TokenIds
from spaceport.runtime.session import Runtime
from spaceport.tools.tune.checkpoint_encoder import checkpoint_encoder
from spaceport.tools.tune.conversation_encoder import ConversationError, conversation_encoder
from spaceport.tools.tune.conversations import Conversation, Turn
from spaceport.tools.tune.samples import prepare
from spaceport.tools.verify.acceptance.source import conversation_encoder_for
from support.paths import TINY

CONVERSATIONS = (
    Conversation(1, (Turn("user", "How does json/scanner.py begin?"), Turn("assistant", "import re\n"))),
    Conversation(2, (Turn("system", "Be brief."), Turn("user", "a"), Turn("assistant", " b "))),
    Conversation(3, (Turn("user", "a"), Turn("assistant", "b"), Turn("user", "c"), Turn("assistant", "d"))),
    Conversation(4, (Turn("text", "import re\n\nNaN = float('nan')\n"),)),
)

# argv: bundle, data. Fails if a package that only export or training needs is imported.
MEASURE = """
import sys

class Hide:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "onnx", "accelerate", "peft", "matplotlib"):
            raise ModuleNotFoundError(f"{name} is hidden", name=name)

sys.meta_path.insert(0, Hide)
from spaceport.tools.cli import run
sys.exit(run(["acceptance", *sys.argv[1:], "--max-tokens", "8", "--threads", "1", "--json"]))
"""


def test_a_bundle_tokenizes_conversations_as_training_does(tiny_bundle: Path) -> None:
    training = prepare(CONVERSATIONS, checkpoint_encoder(TINY, False), 512)
    with Runtime.open(tiny_bundle, threads=1) as runtime:
        bundle = prepare(CONVERSATIONS, conversation_encoder_for(runtime), 512)
    assert training.counts == bundle.counts
    assert len(training.whole) == 4
    for one, other in zip(training.whole, bundle.whole, strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        assert one.learned.tolist() == other.learned.tolist()


def test_a_bundle_is_measured_where_only_its_backend_is_installed(tiny_bundle: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(
        json.dumps({"prompt": "How does json/scanner.py begin?", "response": "import re\n"}) + "\n", "utf-8"
    )
    command = [sys.executable, "-c", MEASURE, str(tiny_bundle), str(data)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["samples"] == 1


def test_an_error_of_the_chat_template_names_the_line_of_the_conversation() -> None:

    tokenizer = AutoTokenizer.from_pretrained(TINY, local_files_only=True)
    tokenizer.chat_template = (
        "{{ raise_exception('only one turn') if messages | length > 1 else messages[0]['content'] }}"
    )
    encoder = conversation_encoder(tokenizer, TokenIds(mask=(4,), end=(1,)))
    with pytest.raises(
        ConversationError, match=r"line 3: the chat template raised: only one turn: expected turns that"
    ):
        prepare(CONVERSATIONS[2:3], encoder, 512)
