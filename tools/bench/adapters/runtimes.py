"""Runtimes: what `bench compare` calls of each, a class per runtime; that of Spaceport is in `on_spaceport`.

The interpreter of a runtime's environment runs this file, so that it imports the standard library only, and the libraries
of a runtime when its model is opened. Times are in seconds; NotImplementedError marks a call that a runtime's API lacks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

BATCH = 2048  # tokens per call of llama.cpp: its default
NGRAM = 3  # longest repetition that OpenVINO's prompt lookup searches: that of its samples
CACHE_GB = 1  # KV cache of OpenVINO's pipeline for several requests

Row = tuple[int, int, int, bool]  # of llama.cpp: token, position, sequence, whether its logits are wanted


def timed(work: Callable[[], object]) -> float:
    """Seconds of a call."""
    before = perf_counter()
    work()
    return perf_counter() - before


class Runner:
    """An open model of one runtime, on the CPU: `model` in its settings, for contexts of `length` tokens."""

    LIBRARIES: ClassVar[Sequence[str]]  # modules to import before opening the model
    PACKAGES: ClassVar[Sequence[str]]  # packages whose versions are reported

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.model: Any = None
        self.threads: int = settings["threads"]

    def step(self, prompt: list[int], tokens: int) -> Callable[[], object]:
        """What generates one more token after the prompt and its first token, up to `tokens`."""
        raise NotImplementedError

    def feed(self, prompt: list[int], rows: list[int]) -> tuple[Callable[[], object], Callable[[], object]]:
        """What feeds rows after the cached prompt and computes the logits of each, and what removes them again."""
        raise NotImplementedError(
            "no call of its API feeds several tokens after a cached prompt and returns their logits"
        )

    def first_token(self, prompt: list[int]) -> object:
        """The first token of a prompt."""
        raise NotImplementedError

    def decode(self, prompt: list[int], tokens: int) -> list[float]:
        """Time of each decode step after the first, for exactly `tokens` tokens without drafts."""
        step = self.step(prompt, tokens)
        return [timed(step) for _ in range(tokens - 1)]

    def rows(self, prompt: list[int], rows: list[int], repeats: int) -> list[float]:
        """Times of `repeats` steps that feed these rows after the cached prompt and compute the logits of each."""
        feed, remove = self.feed(prompt, rows)
        times = []
        for _ in range(repeats + 1):
            times.append(timed(feed))
            remove()
        return times[1:]

    def prefill(self, prompt: list[int]) -> float:
        """Time to the first token of a prompt."""
        return timed(lambda: self.first_token(prompt))

    def requests(self, prompts: list[list[int]], tokens: int) -> tuple[int, float]:
        """Number of tokens generated for all prompts concurrently, and the time."""
        raise NotImplementedError

    def answer(self, prompt: list[int], tokens: int, ends: list[int], lookup: int) -> dict[str, Any]:
        """The greedy answer of at most `tokens` tokens up to an end token, with `lookup` draft tokens per step.

        `tokens`: the answer, end token included; `first_tokens`: the number of tokens that the first step generated;
        `first_token_seconds` and `seconds`: time to the first and to the last token.
        """
        raise NotImplementedError("it answers no prompts here")


class Transformers(Runner):
    """The model's forward with a `DynamicCache`; concurrent requests as one batch of `generate`."""

    LIBRARIES = ("numpy", "torch", "transformers")
    PACKAGES = ("transformers", "torch", "numpy")

    def __init__(self, settings: dict[str, Any]) -> None:
        import torch
        import transformers

        super().__init__(settings)
        torch.set_num_threads(self.threads)
        dtype = getattr(torch, settings.get("dtype", "float32"))
        self.torch, self.transformers = torch, transformers
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            settings["model"], dtype=dtype, attn_implementation="sdpa", local_files_only=True
        ).eval()
        self.model.requires_grad_(False)

    def step(self, prompt: list[int], tokens: int) -> Callable[[], object]:
        cache, token = self.first_token(prompt)

        def step() -> None:
            nonlocal token
            token = self._feed([token], cache)

        return step

    def feed(self, prompt: list[int], rows: list[int]) -> tuple[Callable[[], object], Callable[[], object]]:
        cache, _ = self.first_token(prompt)
        return lambda: self._feed(rows, cache), lambda: cache.crop(-len(rows))

    def first_token(self, prompt: list[int]) -> tuple[Any, int]:
        cache = self.transformers.DynamicCache(config=self.model.config)
        inputs = self.torch.tensor([prompt])
        logits = self.model(input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        return cache, int(logits[0, -1].argmax())

    def requests(self, prompts: list[list[int]], tokens: int) -> tuple[int, float]:
        inputs = self.torch.tensor(prompts)
        mask = self.torch.ones_like(inputs)
        before = perf_counter()
        texts = self.model.generate(
            inputs, attention_mask=mask, do_sample=False, min_new_tokens=tokens, max_new_tokens=tokens, pad_token_id=0
        )
        return int(texts.shape[0] * (texts.shape[1] - inputs.shape[1])), perf_counter() - before

    def answer(self, prompt: list[int], tokens: int, ends: list[int], lookup: int) -> dict[str, Any]:
        inputs = self.torch.tensor([prompt])
        times = StepTimes()
        before = perf_counter()
        text = self.model.generate(
            inputs,
            attention_mask=self.torch.ones_like(inputs),
            do_sample=False,
            max_new_tokens=tokens,
            eos_token_id=ends or None,
            pad_token_id=0,
            streamer=times,
            **({"prompt_lookup_num_tokens": lookup} if lookup else {}),
        )
        seconds = perf_counter() - before
        (_, (first_tokens, first), *_) = times.steps  # after the prompt
        answer = text[0, len(prompt) :].tolist()
        return {
            "tokens": answer,
            "first_tokens": first_tokens,
            "first_token_seconds": first - before,
            "seconds": seconds,
        }

    def _feed(self, tokens: list[int], cache: Any) -> int:
        inputs = self.torch.tensor([tokens])
        return int(self.model(input_ids=inputs, past_key_values=cache, use_cache=True).logits[0, -1].argmax())


class StepTimes:
    """A streamer of transformers that records the number of tokens and the time of each step, the prompt included."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, float]] = []

    def put(self, tokens: Any) -> None:
        self.steps.append((tokens.numel(), perf_counter()))

    def end(self) -> None:
        """Nothing follows."""


class Genai(Runner):
    """onnxruntime-genai: greedy `Generator`, one per prompt; concurrent requests as one batch."""

    LIBRARIES = ("numpy", "onnxruntime_genai")
    PACKAGES = ("onnxruntime-genai", "onnxruntime", "numpy")

    def __init__(self, settings: dict[str, Any]) -> None:
        import onnxruntime_genai

        super().__init__(settings)
        self.library = onnxruntime_genai
        self.model = self._open(settings["model"])
        self.rows_model: Any = None  # the variant with logits of all rows, opened when first needed

    def step(self, prompt: list[int], tokens: int) -> Callable[[], object]:
        generator = self._generator(self.model, [prompt], len(prompt) + tokens)
        generator.generate_next_token()
        step: Callable[[], object] = generator.generate_next_token
        return step

    def feed(self, prompt: list[int], rows: list[int]) -> tuple[Callable[[], object], Callable[[], object]]:
        import numpy as np

        if self.rows_model is None:
            self.rows_model = self._open(self.settings["rows_model"])
        generator = self._generator(self.rows_model, [prompt], self.settings["length"])
        draft = np.array(rows, np.int32)
        return lambda: generator.append_tokens(draft), lambda: generator.rewind_to(len(prompt))

    def first_token(self, prompt: list[int]) -> object:
        return self._generator(self.model, [prompt], len(prompt) + 1).generate_next_token()

    def requests(self, prompts: list[list[int]], tokens: int) -> tuple[int, float]:
        before = perf_counter()
        generator = self._generator(self.model, prompts, len(prompts[0]) + tokens)
        for _ in range(tokens):
            generator.generate_next_token()
        return len(prompts) * tokens, perf_counter() - before

    def answer(self, prompt: list[int], tokens: int, ends: list[int], lookup: int) -> dict[str, Any]:
        before = perf_counter()
        generator = self._generator(self.model, [prompt], len(prompt) + tokens, ends=True)
        text: list[int] = []
        first = 0.0
        while len(text) < tokens and text[-1:] not in [[end] for end in ends]:
            generator.generate_next_token()
            text.append(int(generator.get_next_tokens()[0]))
            first = first or perf_counter() - before
        return {
            "tokens": text,
            "first_tokens": 1,
            "first_token_seconds": first,
            "seconds": perf_counter() - before,
        }

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

    Only the number of threads is set: precision hints and the attention backend stay at their defaults.
    """

    LIBRARIES = ("numpy", "openvino", "openvino_genai")
    PACKAGES = ("openvino-genai", "openvino", "openvino-tokenizers", "numpy")

    def __init__(self, settings: dict[str, Any]) -> None:
        import openvino
        import openvino_genai

        super().__init__(settings)
        self.openvino, self.genai = openvino, openvino_genai
        self.model = settings["model"]
        self.properties = {"INFERENCE_NUM_THREADS": self.threads}
        self.pipeline = openvino_genai.LLMPipeline(self.model, "CPU", **self.properties)
        self.stateful: Any = None  # three more compiled models are created when first needed
        self.batching: Any = None
        self.looking_up: Any = None

    def decode(self, prompt: list[int], tokens: int) -> list[float]:
        times: list[float] = []
        running = self.genai.StreamingStatus.RUNNING

        class Times(self.genai.StreamerBase):  # type: ignore[name-defined, misc]
            def write(self, token: object) -> Any:
                times.append(perf_counter())
                return running

            def end(self) -> None:
                pass

        self.pipeline.generate(self._tensor(prompt), self._plain(tokens), Times())
        return [later - earlier for earlier, later in pairwise(times)]

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
        return self.pipeline.generate(self._tensor(prompt), self._plain(1))

    def requests(self, prompts: list[list[int]], tokens: int) -> tuple[int, float]:
        if self.batching is None:
            scheduler = self.genai.SchedulerConfig()
            scheduler.cache_size = CACHE_GB
            self.batching = self.genai.ContinuousBatchingPipeline(self.model, scheduler, "CPU", self.properties)
        inputs = [self._tensor(prompt) for prompt in prompts]
        before = perf_counter()
        results = self.batching.generate(inputs, [self._plain(tokens)] * len(prompts))
        seconds = perf_counter() - before
        return sum(len(result.m_generation_ids[0]) for result in results), seconds

    def answer(self, prompt: list[int], tokens: int, ends: list[int], lookup: int) -> dict[str, Any]:
        pipeline, config = self.pipeline, self._plain(tokens)
        config.ignore_eos, config.stop_token_ids = False, set(ends)
        if lookup:
            if self.looking_up is None:
                properties = {**self.properties, "prompt_lookup": True}
                self.looking_up = self.genai.LLMPipeline(self.model, "CPU", **properties)
            pipeline = self.looking_up
            config.num_assistant_tokens, config.max_ngram_size = lookup, NGRAM
        before = perf_counter()
        result = pipeline.generate(self._tensor(prompt), config)
        seconds = perf_counter() - before
        first = result.perf_metrics.get_ttft().mean / 1e3
        return {
            "tokens": list(result.tokens[0]),
            "first_tokens": 1,
            "first_token_seconds": first,
            "seconds": seconds,
        }

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

    def _plain(self, tokens: int) -> Any:
        config = self.genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = tokens, True, False
        return config


class CTranslate2(Runner):
    """Greedy `Generator.generate_batch`, whole prompts in one call as documented for long inputs."""

    LIBRARIES = ("numpy", "ctranslate2")
    PACKAGES = ("ctranslate2", "numpy")

    def __init__(self, settings: dict[str, Any]) -> None:
        import ctranslate2

        super().__init__(settings)
        self.vocabulary = json.loads((Path(settings["model"]) / "vocabulary.json").read_text("utf-8"))
        options = {"compute_type": settings["compute_type"], "inter_threads": 1, "intra_threads": self.threads}
        self.model = ctranslate2.Generator(settings["model"], "cpu", **options)

    def decode(self, prompt: list[int], tokens: int) -> list[float]:
        times: list[float] = []

        def step(_: object) -> bool:
            times.append(perf_counter())
            return False

        self._generate([prompt], tokens, step)
        return [later - earlier for earlier, later in pairwise(times)]

    def first_token(self, prompt: list[int]) -> object:
        return self._generate([prompt], 1)

    def requests(self, prompts: list[list[int]], tokens: int) -> tuple[int, float]:
        before = perf_counter()
        results = self._generate(prompts, tokens)
        seconds = perf_counter() - before
        return sum(len(result.sequences_ids[0]) for result in results), seconds

    def _generate(self, prompts: list[list[int]], tokens: int, callback: Callable[[object], bool] | None = None) -> Any:
        words = [[self.vocabulary[token] for token in prompt] for prompt in prompts]
        lengths = {"min_length": tokens, "max_length": tokens}
        return self.model.generate_batch(
            words, beam_size=1, include_prompt_in_result=False, callback=callback, **lengths
        )


class LlamaCpp(Runner):
    """llama.cpp: its low-level API, with logits of every row of a step; concurrent requests as sequences of a batch."""

    LIBRARIES = ("numpy", "llama_cpp", "llama_cpp.llama_speculative")
    PACKAGES = ("llama-cpp-python", "numpy")

    def __init__(self, settings: dict[str, Any]) -> None:
        import llama_cpp

        super().__init__(settings)
        llama_cpp.llama_backend_init()
        self.library = llama_cpp
        options = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(settings["model"].encode(), options)
        self.single = LlamaContext(llama_cpp, self.model, settings["length"], 1, self.threads)
        self.several: LlamaContext | None = None  # created when first needed

    def step(self, prompt: list[int], tokens: int) -> Callable[[], object]:
        token, position = self.first_token(prompt), len(prompt)

        def step() -> None:
            nonlocal token, position
            self.single.feed([(token, position, 0, True)])
            token, position = self.single.best(0), position + 1

        return step

    def feed(self, prompt: list[int], rows: list[int]) -> tuple[Callable[[], object], Callable[[], object]]:
        self.first_token(prompt)
        step = [(token, len(prompt) + index, 0, True) for index, token in enumerate(rows)]

        def feed() -> None:
            self.single.feed(step)
            self.single.best(len(rows) - 1)

        return feed, lambda: self.single.forget(len(prompt))

    def first_token(self, prompt: list[int]) -> int:
        self.single.forget()
        last = len(prompt) - 1
        self.single.feed([(token, position, 0, position == last) for position, token in enumerate(prompt)])
        return self.single.best(last % BATCH)

    def requests(self, prompts: list[list[int]], tokens: int) -> tuple[int, float]:
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

    def answer(self, prompt: list[int], tokens: int, ends: list[int], lookup: int) -> dict[str, Any]:
        before = perf_counter()
        text = [self.first_token(prompt)]
        first = perf_counter() - before
        while len(text) < tokens and text[-1] not in ends:
            drafts = self._following([*prompt, *text], min(lookup, tokens - len(text) - 1))
            position = len(prompt) + len(text) - 1
            rows = [text[-1], *drafts]
            self.single.feed([(token, position + row, 0, True) for row, token in enumerate(rows)])
            for row in range(len(rows)):
                text.append(self.single.best(row))
                if text[-1] in ends or rows[row + 1 : row + 2] != text[-1:]:
                    break
            self.single.forget(len(prompt) + len(text) - 1)
        seconds = perf_counter() - before
        return {"tokens": text, "first_tokens": 1, "first_token_seconds": first, "seconds": seconds}

    def _following(self, tokens: list[int], count: int) -> list[int]:
        """What followed the last tokens when they occurred before, by the library's prompt lookup."""
        import numpy as np
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        if count < 1:
            return []
        return [int(token) for token in LlamaPromptLookupDecoding(num_pred_tokens=count)(np.array(tokens, np.intc))]


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
