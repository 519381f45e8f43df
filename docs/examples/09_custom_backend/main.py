"""Run an engine of your own: here a Markov model in numpy replaces the bundle's graph."""

import sys
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from spaceport import Decoding, Runtime
from spaceport.graphs.contract.signature import Signature
from spaceport.runtime.bundle import open_bundle
from spaceport.runtime.engine import Batch, Costs, Engine, Moves, capacity_for
from spaceport.runtime.text.tokenizer import open_tokenizer

TEXT = "the cat sat on the mat. the dog sat on the log. the cat saw the dog. " * 4
LONGEST = 256  # tokens of a prompt and its completion


class MarkovEngine(Engine):
    """The token that most often follows the last two; its KV buffers hold tokens and their positions."""

    device = "cpu"
    costs = Costs(row=0.0, call_rows=64)  # additional rows are nearly free, so drafts may be wide

    def __init__(self, signature: Signature, capacity: int, tokens: Sequence[int], requests: int = 1) -> None:
        self.signature = signature
        self.capacity = capacity  # slots of a request
        self.requests = requests
        self.rows = capacity  # most rows of a request in a step
        self.tokens = np.zeros((requests, capacity), np.int64)
        self.positions = np.zeros((requests, capacity), np.int64)
        self.followers: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)
        for first, second, third in zip(tokens, tokens[1:], tokens[2:], strict=False):
            self.followers[first, second][third] += 1

    def run(self, batch: Batch) -> NDArray[np.float32]:
        """The logits of the wanted rows: requests x wanted rows x vocabulary."""
        logits = np.zeros((*batch.logit_rows.shape, self.signature.vocab_size), np.float32)
        for line, request in enumerate(range(batch.first, batch.first + batch.requests)):
            slots = batch.slot_ids[line]
            self.tokens[request, slots] = batch.input_ids[line]  # every row writes before any row reads
            self.positions[request, slots] = batch.position_ids[line]
            for index, row in enumerate(batch.logit_rows[line]):
                last = batch.input_ids[line, row]
                before = self._token_before(request, batch.attention_mask[line, 0, row], batch.position_ids[line, row])
                for token, count in self.followers[before, int(last)].items():
                    logits[line, index, token] = count
        return logits

    def _token_before(self, request: int, visible: NDArray[np.bool_], position: int) -> int:
        """The visible token one position to the left: what a row may see is a set of slots, in any order."""
        (slots,) = np.nonzero(visible)
        found = slots[self.positions[request, slots] == position - 1]
        return int(self.tokens[request, found[0]]) if found.size else -1

    def move(self, first: int, moves: Sequence[Moves]) -> None:
        """Copy slots; called for append-lowered bundles only."""
        for request, (sources, targets) in enumerate(moves, first):
            self.tokens[request, targets] = self.tokens[request, sources]
            self.positions[request, targets] = self.positions[request, sources]

    def copy(self, source: int, target: int, slots: NDArray[np.int64]) -> None:
        """Copy slots to the lowest ones of another request; called with a prefix cache only."""
        self.tokens[target, : slots.size] = self.tokens[source, slots]
        self.positions[target, : slots.size] = self.positions[source, slots]

    def clear(self, request: int) -> None:
        self.tokens[request] = self.positions[request] = 0

    def close(self) -> None:
        pass


bundle = open_bundle(sys.argv[1])  # its tokenizer, special tokens and signature are used, its graph is not
corpus = open_tokenizer(bundle).encode(TEXT, add_special_tokens=False).ids
engine = MarkovEngine(bundle.manifest.signature, capacity_for(bundle.manifest, LONGEST), corpus)

with Runtime(bundle, engine, max_seq_len=LONGEST) as runtime:
    drafted = runtime.generate("the dog", Decoding(max_tokens=60, fork=False, mask_slots=0, lookup=6))
    plain = runtime.generate("the dog", Decoding(max_tokens=60, fork=False, mask_slots=0, lookup=0))

print("the dog" + drafted.text)
print("---")
print(f"prompt lookup: {drafted.statistics.tokens} tokens in {drafted.statistics.steps} steps")
print(f"plain: {plain.statistics.tokens} tokens in {plain.statistics.steps} steps")
print("same text:", drafted.text == plain.text)
