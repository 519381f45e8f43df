"""Evaluations: lm-eval's numbers over HTTP, compared with those of the runtime."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from real_clients.environments import run
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime

_TOLERANCE = 1e-3  # of a log probability of several tokens
_TOKENS = 24
_STOP = "\n\n"
_DOCUMENTS = (
    ("The sky is", ("blue", "green", "an apple"), 0),
    ("Two and two make", ("four", "seven"), 0),
    ("import json\nimport", ("os", "apples"), 0),
    ("def close(self):\n    self.file", (".close()", "is a dog"), 0),
)
_METRICS = {"choice": "acc", "continue": "exact_match"}
_TASKS: dict[str, dict[str, Any]] = {
    "choice": {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}"},
    "continue": {
        "output_type": "generate_until",
        "generation_kwargs": {"until": [_STOP], "max_gen_toks": _TOKENS, "do_sample": False, "temperature": 0},
    },
}


def check(programs: Path, url: str, runtime: Runtime, folder: Path) -> list[str]:
    """What lm-eval found, one sentence per kind of request; raises AssertionError for a number that is not the runtime's."""
    (folder / "tasks").mkdir(exist_ok=True)
    documents = folder / "tasks" / "documents.jsonl"
    lines = [json.dumps({"text": text, "choices": each, "label": label}) for text, each, label in _DOCUMENTS]
    documents.write_text("\n".join(lines) + "\n", "utf-8")
    for name, task in _TASKS.items():
        common = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(documents)}},
            "test_split": "test",
            "doc_to_text": "{{text}}",
            "doc_to_target": "{{label}}",
            "metadata": {"version": 1},
            "metric_list": [{"metric": _METRICS[name], "aggregation": "mean", "higher_is_better": True}],
        }
        documents.with_name(f"{name}.yaml").write_text(json.dumps({**common, **task}), "utf-8")  # JSON is YAML
    program = str(programs / "lm_eval")
    texts = _evaluate(program, "local-completions", f"{url}/completions", ("choice", "continue"), folder)
    chats = _evaluate(program, "local-chat-completions", f"{url}/chat/completions", ("continue",), folder)
    return [
        f"local-completions: {_scores(texts['choice'], runtime)} log-likelihoods equal `Runtime.score`",
        f"local-completions: {_texts(texts['continue'], runtime, chat=False)} texts equal `Runtime.generate`",
        f"local-chat-completions: {_texts(chats['continue'], runtime, chat=True)} answers equal `Runtime.generate`",
    ]


def _evaluate(
    program: str, model: str, url: str, tasks: Sequence[str], folder: Path
) -> dict[str, list[dict[str, Any]]]:
    """The samples of each task."""
    output = folder / model
    arguments = f"model=model,base_url={url},num_concurrent=4,max_retries=1"
    chat = ["--apply_chat_template"] if "chat" in model else []
    command = [program, "run", "--model", model, "--model_args", arguments, "--tasks", ",".join(tasks), *chat]
    run([*command, "--include_path", str(folder / "tasks"), "--output_path", str(output), "--log_samples"], folder, 240)
    found = {}
    for task in tasks:
        file = max(output.rglob(f"samples_{task}_*.jsonl"))
        found[task] = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    return found


def _scores(samples: Iterable[dict[str, Any]], runtime: Runtime) -> int:
    """The number of log-likelihoods, all of which are those of the runtime."""
    count = 0
    for sample in samples:
        for arguments, ((logprob, greedy),) in zip(sample["arguments"].values(), sample["resps"], strict=True):
            context, continuation = arguments["arg_0"], arguments["arg_1"]
            start = len(_ids(runtime, context))
            score = runtime.score(_ids(runtime, context + continuation), top=1)
            scored = score.logprobs[start - 1 :]
            expected = sum(each.logprob for each in scored)
            assert abs(float(logprob) - expected) < _TOLERANCE, f"{arguments}: got {logprob}, expected {expected}"
            is_best = all(each.logprob == each.top[0].logprob for each in scored)
            assert greedy == str(is_best), f"{arguments}: got is_greedy {greedy}, expected {is_best}"
            count += 1
    return count


def _texts(samples: Iterable[dict[str, Any]], runtime: Runtime, chat: bool) -> int:
    """The number of generated texts, all of which are those of the runtime."""
    count, decoding = 0, Decoding(max_tokens=_TOKENS, fork=False, stop=_STOP)
    for sample in samples:
        text = sample["doc"]["text"]
        prompt = [{"role": "user", "content": text}] if chat else _ids(runtime, text)
        expected, ((found,),) = runtime.generate(prompt, decoding).text, sample["resps"]
        assert found == expected, f"{text!r}: got {found!r}, expected {expected!r}"
        count += 1
    return count


def _ids(runtime: Runtime, text: str) -> list[int]:
    """The tokens of a text as lm-eval asks for them: without those that begin a prompt."""
    return list(runtime.tokenizer.encode(text, add_special_tokens=False).ids)
