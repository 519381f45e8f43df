"""llama.cpp: its low-level API, with logits of every row of a step; concurrent requests as sequences of one batch."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

LIBRARIES = ("numpy", "llama_cpp", "llama_cpp.llama_speculative")
PACKAGES = ("llama-cpp-python", "numpy")
BATCH = 2048  # tokens per call; llama.cpp's default

Row = tuple[int, int, int, bool]  # token, position, sequence, whether its logits are wanted


class Context:
    """A llama.cpp context: the KV cache of a number of sequences."""

    def __init__(self, library: Any, model: Any, length: int, sequences: int, threads: int) -> None:
        self.library, self.sequences = library, sequences
        self.vocabulary = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
        options = library.llama_context_default_params()
        options.n_ctx, options.n_seq_max = length * sequences, sequences
        options.n_batch = BATCH
        options.n_threads = options.n_threads_batch = threads
        self.handle = library.llama_init_from_model(model, options)
        self.memory = library.llama_get_memory(self.handle)
        self.batch = library.llama_batch_init(BATCH, 0, 1)

    def feed(self, rows: Sequence[Row]) -> None:
        """Feed rows, at most BATCH at a time."""
        for begin in range(0, len(rows), BATCH):
            part = rows[begin : begin + BATCH]
            self.batch.n_tokens = len(part)
            for index, (token, position, sequence, wanted) in enumerate(part):
                self.batch.token[index], self.batch.pos[index] = token, position
                self.batch.n_seq_id[index], self.batch.seq_id[index][0] = 1, sequence
                self.batch.logits[index] = wanted
            if code := self.library.llama_decode(self.handle, self.batch):
                raise RuntimeError(f"llama_decode returned {code}")

    def best(self, row: int) -> int:
        """The greedy token of a row of the last call."""
        import numpy as np

        logits = self.library.llama_get_logits_ith(self.handle, row)
        return int(np.ctypeslib.as_array(logits, (self.vocabulary,)).argmax())

    def forget(self, begin: int = 0) -> None:
        """Remove cached tokens from a position on."""
        self.library.llama_memory_seq_rm(self.memory, -1, begin, -1)


class Runner:
    """An open GGUF model; a second context for concurrent requests is created when first needed."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import llama_cpp

        llama_cpp.llama_backend_init()
        self.library, self.threads = llama_cpp, settings["threads"]
        options = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(settings["model"].encode(), options)
        self.single = Context(llama_cpp, self.model, settings["length"], 1, self.threads)
        self.several: Context | None = None

    def decode(self, prompt: list[int], tokens: int) -> list[float]:
        token, times = self._read(prompt), []
        for position in range(len(prompt), len(prompt) + tokens - 1):
            before = perf_counter()
            self.single.feed([(token, position, 0, True)])
            token = self.single.best(0)
            times.append(perf_counter() - before)
        return times

    def rows(self, prompt: list[int], rows: list[int], repeats: int) -> list[float]:
        self._read(prompt)
        step = [(token, len(prompt) + index, 0, True) for index, token in enumerate(rows)]
        times = []
        for _ in range(repeats + 1):
            before = perf_counter()
            self.single.feed(step)
            self.single.best(len(rows) - 1)
            times.append(perf_counter() - before)
            self.single.forget(len(prompt))
        return times[1:]

    def prefill(self, prompt: list[int]) -> float:
        before = perf_counter()
        self._read(prompt)
        return perf_counter() - before

    def requests(self, prompts: list[list[int]], tokens: int) -> tuple[int, float]:
        length = len(prompts[0])
        if self.several is None:
            self.several = Context(self.library, self.model, length + tokens, len(prompts), self.threads)
        context = self.several
        context.forget()
        before = perf_counter()
        context.feed([(t, i, s, i == length - 1) for s, prompt in enumerate(prompts) for i, t in enumerate(prompt)])
        rows = [(sequence + 1) * length - 1 for sequence in range(len(prompts))]
        found = [context.best(row) for row in rows]
        for position in range(length, length + tokens - 1):
            context.feed([(token, position, sequence, True) for sequence, token in enumerate(found)])
            found = [context.best(sequence) for sequence in range(len(prompts))]
        return len(prompts) * tokens, perf_counter() - before

    def answer(self, prompt: list[int], tokens: int, ends: list[int], lookup: int) -> dict[str, Any]:
        before = perf_counter()
        found = [self._read(prompt)]
        first = perf_counter() - before
        while len(found) < tokens and found[-1] not in ends:
            drafts = self._following([*prompt, *found], min(lookup, tokens - len(found) - 1))
            position = len(prompt) + len(found) - 1
            rows = [found[-1], *drafts]
            self.single.feed([(token, position + row, 0, True) for row, token in enumerate(rows)])
            for row in range(len(rows)):
                found.append(self.single.best(row))
                if found[-1] in ends or rows[row + 1 : row + 2] != found[-1:]:
                    break
            self.single.forget(len(prompt) + len(found) - 1)
        return {
            "tokens": found,
            "first_tokens": 1,
            "first_token_seconds": first,
            "seconds": perf_counter() - before,
        }

    def _following(self, tokens: list[int], count: int) -> list[int]:
        """What followed the last tokens when they occurred before, by the library's prompt lookup."""
        import numpy as np
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        if count < 1:
            return []
        return [int(token) for token in LlamaPromptLookupDecoding(num_pred_tokens=count)(np.array(tokens, np.intc))]

    def _read(self, prompt: list[int]) -> int:
        self.single.forget()
        last = len(prompt) - 1
        self.single.feed([(token, position, 0, position == last) for position, token in enumerate(prompt)])
        return self.single.best(last % BATCH)


def open_runner(settings: dict[str, Any]) -> Runner:
    """The GGUF file `model` on the CPU."""
    return Runner(settings)
