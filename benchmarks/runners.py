"""Runners: what the harness calls of each runtime, a class per runtime; that of Spaceport is in `on_spaceport`.

The interpreter of a runtime's environment runs `runners.py FILE CLASS`, so that this file imports the standard library
only, and the libraries of a runtime when its model is opened. Times are in seconds.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

BATCH = 2048  # tokens per call of llama.cpp: its default
LOOKUP, NGRAM = 10, 3  # draft tokens, and longest repetition that is searched, of OpenVINO's prompt lookup
CACHE_GB = 1  # KV cache of OpenVINO's pipeline for several requests

# `output`: what is compared; `tokens`: number of tokens, end token included; `seconds`, and `first` of them to the first
# token.
Answer = dict[str, Any]
Row = tuple[int, int, int, bool]  # of llama.cpp: token, position, sequence, whether its logits are wanted


def timed(work: Callable[[], object]) -> float:
    """Seconds of a call."""
    before = perf_counter()
    work()
    return perf_counter() - before


def answer(text: list[int], times: list[float]) -> Answer:
    """An answer, given the times at which it grew."""
    return {"output": text, "tokens": len(text), "seconds": times[-1], "first": times[0]}


class Runner:
    """An open model of one runtime, on the CPU: `model` in its settings, for contexts of `length` tokens.

    - `decode(prompt, tokens, ends)`: Greedy answer of at most `tokens` tokens up to an end token.
    - `rows(prompt, rows, repeats)`: Times of steps that feed these rows after the cached prompt and compute the logits of
      each.
    - `concurrent(prompts, tokens)`: Number of tokens generated for all prompts at once, and the time; end tokens do not end
      an answer.
    """

    PACKAGES: ClassVar[Sequence[str]]  # packages whose versions are reported

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.threads: int = settings["threads"]

    def first_token(self, prompt: list[int]) -> object:
        """The first token of a prompt."""
        raise NotImplementedError

    def prefill(self, prompt: list[int]) -> float:
        """Time to the first token of a prompt."""
        return timed(lambda: self.first_token(prompt))


class Genai(Runner):
    """onnxruntime-genai: greedy `Generator`, one per prompt; concurrent requests as one batch."""

    PACKAGES = ("onnxruntime-genai",)

    def __init__(self, settings: dict[str, Any]) -> None:
        import onnxruntime_genai

        super().__init__(settings)
        self.library = onnxruntime_genai
        self.model = self._open(settings["model"])
        self.rows_model: Any = None  # the variant with logits of all rows, opened when first needed

    def decode(self, prompt: list[int], tokens: int, ends: list[int]) -> Answer:
        before = perf_counter()
        generator = self._generator(self.model, [prompt], len(prompt) + tokens, ends=True)
        text: list[int] = []
        times: list[float] = []
        while len(text) < tokens and not (text and text[-1] in ends):
            generator.generate_next_token()
            text.append(int(generator.get_next_tokens()[0]))
            times.append(perf_counter() - before)
        return answer(text, times)

    def rows(self, prompt: list[int], rows: list[int], repeats: int) -> list[float]:
        import numpy as np

        if self.rows_model is None:
            self.rows_model = self._open(self.settings["rows_model"])
        generator = self._generator(self.rows_model, [prompt], self.settings["length"])
        draft, times = np.array(rows, np.int32), []
        for _ in range(repeats + 1):
            times.append(timed(lambda: generator.append_tokens(draft)))
            generator.rewind_to(len(prompt))
        return times[1:]

    def first_token(self, prompt: list[int]) -> object:
        return self._generator(self.model, [prompt], len(prompt) + 1).generate_next_token()

    def concurrent(self, prompts: list[list[int]], tokens: int) -> tuple[int, float]:
        before = perf_counter()
        generator = self._generator(self.model, prompts, len(prompts[0]) + tokens)
        for _ in range(tokens):
            generator.generate_next_token()
        return len(prompts) * tokens, perf_counter() - before

    def _open(self, folder: str) -> Any:
        config = self.library.Config(folder)
        options = {"session_options": {"intra_op_num_threads": self.threads}}
        config.overlay(json.dumps({"model": {"decoder": options}}))
        return self.library.Model(config)

    def _generator(self, model: Any, prompts: list[list[int]], length: int, ends: bool = False) -> Any:
        import numpy as np

        params = self.library.GeneratorParams(model)
        params.set_search_options(
            do_sample=False,
            batch_size=len(prompts),
            min_length=0 if ends else length,  # an end token before it is never chosen
            max_length=length,
            past_present_share_buffer=True,
        )
        generator = self.library.Generator(model, params)
        generator.append_tokens(np.array(prompts, np.int32))
        return generator


class OpenVino(Runner):
    """OpenVINO: `LLMPipeline` for generation, the stateful model in `openvino` itself for steps of several rows.

    Only the number of threads is set: precision hints and the attention backend stay at their defaults. With `lookup` in
    the settings it drafts from the text before.
    """

    PACKAGES = ("openvino-genai", "openvino")

    def __init__(self, settings: dict[str, Any]) -> None:
        import openvino
        import openvino_genai

        super().__init__(settings)
        self.openvino, self.genai = openvino, openvino_genai
        self.model, self.lookup = settings["model"], settings.get("lookup", False)
        self.properties = {"INFERENCE_NUM_THREADS": self.threads}
        looking_up = {"prompt_lookup": True} if self.lookup else {}
        self.pipeline = openvino_genai.LLMPipeline(self.model, "CPU", **self.properties, **looking_up)
        self.stateful: Any = None  # two more compiled models are created when first needed
        self.batching: Any = None

    def decode(self, prompt: list[int], tokens: int, ends: list[int]) -> Answer:
        config = self._config(tokens)
        config.ignore_eos, config.stop_token_ids = False, set(ends)
        times: list[float] = []
        before = perf_counter()

        class Clock(self.genai.StreamerBase):  # type: ignore[misc, name-defined]
            def write(self, token: object) -> Any:
                times.append(perf_counter() - before)
                return running

            def end(self) -> None:
                pass

        running = self.genai.StreamingStatus.RUNNING
        text = list(self.pipeline.generate(self._tensor(prompt), config, Clock()).tokens[0])
        return answer(text, [*times, perf_counter() - before])

    def rows(self, prompt: list[int], rows: list[int], repeats: int) -> list[float]:
        if self.stateful is None:
            model = Path(self.model) / "openvino_model.xml"
            self.stateful = self.openvino.Core().compile_model(model, "CPU", self.properties).create_infer_request()
        times = []
        for _ in range(repeats):
            self.stateful.reset_state()
            warm_up = len(prompt) - len(rows)  # the last prompt tokens are a step of the same shape as the timed one
            self._feed(prompt[:warm_up], 0)
            self._feed(prompt[warm_up:], warm_up)
            times.append(timed(lambda: self._feed(rows, len(prompt))))
        return times

    def first_token(self, prompt: list[int]) -> object:
        return self.pipeline.generate(self._tensor(prompt), self._config(1))

    def concurrent(self, prompts: list[list[int]], tokens: int) -> tuple[int, float]:
        if self.batching is None:
            scheduler = self.genai.SchedulerConfig()
            scheduler.cache_size = CACHE_GB
            self.batching = self.genai.ContinuousBatchingPipeline(self.model, scheduler, "CPU", self.properties)
        inputs = [self._tensor(prompt) for prompt in prompts]
        before = perf_counter()
        results = self.batching.generate(inputs, [self._config(tokens)] * len(prompts))
        return sum(len(result.m_generation_ids[0]) for result in results), perf_counter() - before

    def _feed(self, tokens: list[int], past: int) -> None:
        import numpy as np

        inputs = {
            "input_ids": np.array([tokens], np.int64),
            "attention_mask": np.ones((1, past + len(tokens)), np.int64),
            "position_ids": np.arange(past, past + len(tokens), dtype=np.int64)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        self.stateful.infer(inputs, share_outputs=True)

    def _tensor(self, prompt: list[int]) -> Any:
        import numpy as np

        return self.openvino.Tensor(np.array([prompt], np.int64))

    def _config(self, tokens: int) -> Any:
        config = self.genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = tokens, True, False
        if self.lookup:
            config.num_assistant_tokens, config.max_ngram_size = LOOKUP, NGRAM
        return config


class LlamaCpp(Runner):
    """llama.cpp: its low-level API, with logits of every row of a step; concurrent requests as sequences of a batch."""

    PACKAGES = ("llama-cpp-python",)

    def __init__(self, settings: dict[str, Any]) -> None:
        import llama_cpp

        super().__init__(settings)
        llama_cpp.llama_backend_init()
        self.library = llama_cpp
        options = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(settings["model"].encode(), options)
        self.single = LlamaContext(llama_cpp, self.model, settings["length"], 1, self.threads)
        self.several: LlamaContext | None = None  # created when first needed

    def decode(self, prompt: list[int], tokens: int, ends: list[int]) -> Answer:
        before = perf_counter()
        text = [self.first_token(prompt)]
        times = [perf_counter() - before]
        while len(text) < tokens and text[-1] not in ends:
            self.single.feed([(text[-1], len(prompt) + len(text) - 1, 0, True)])
            text.append(self.single.best(0))
            times.append(perf_counter() - before)
        return answer(text, times)

    def rows(self, prompt: list[int], rows: list[int], repeats: int) -> list[float]:
        self.first_token(prompt)
        step = [(token, len(prompt) + index, 0, True) for index, token in enumerate(rows)]

        def feed() -> None:
            self.single.feed(step)
            self.single.best(len(rows) - 1)

        times = []
        for _ in range(repeats + 1):
            times.append(timed(feed))
            self.single.forget(len(prompt))
        return times[1:]

    def first_token(self, prompt: list[int]) -> int:
        self.single.forget()
        last = len(prompt) - 1
        self.single.feed([(token, position, 0, position == last) for position, token in enumerate(prompt)])
        return self.single.best(last % BATCH)

    def concurrent(self, prompts: list[list[int]], tokens: int) -> tuple[int, float]:
        length = len(prompts[0])
        if self.several is None:
            self.several = LlamaContext(self.library, self.model, length + tokens, len(prompts), self.threads)
        context = self.several
        context.forget()
        before = perf_counter()
        context.feed([(t, i, s, i == length - 1) for s, prompt in enumerate(prompts) for i, t in enumerate(prompt)])
        newest = [context.best((sequence + 1) * length - 1) for sequence in range(len(prompts))]
        for position in range(length, length + tokens - 1):
            context.feed([(token, position, sequence, True) for sequence, token in enumerate(newest)])
            newest = [context.best(sequence) for sequence in range(len(prompts))]
        return len(prompts) * tokens, perf_counter() - before


class LlamaContext:
    """A llama.cpp context: the KV cache of a number of sequences."""

    def __init__(self, library: Any, model: Any, length: int, sequences: int, threads: int) -> None:
        self.library = library
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


def main(file: str, name: str) -> None:
    """Answer calls, a line of JSON `{"call": NAME, ...}` each, until the input ends; output of libraries goes to stderr."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    runner: Any = None
    for line in sys.stdin:
        arguments = json.loads(line)
        call = arguments.pop("call")
        if call == "open":
            runner = runpy.run_path(file)[name](arguments)
            result = {package: importlib.metadata.version(package) for package in runner.PACKAGES}
        else:
            result = getattr(runner, call)(**arguments)
        channel.write(json.dumps(result) + "\n")
        channel.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
