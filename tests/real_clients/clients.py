"""Clients: lm-eval, whose numbers are compared with those of the runtime, guidellm and schemathesis.

Each gets the folder of its programs, the address of the service, a runtime of the same bundle, and a folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
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
# Requests of guidellm, streams at a time, and tokens of each
_PROMPTS = tuple(f"Write {number} sentences about the sea." for number in range(2, 14))
_REQUESTS, _STREAMS, _OUTPUT = 12, 4, 16


def lm_eval(programs: Path, url: str, runtime: Runtime, folder: Path) -> list[str]:
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


def _tokenizer(runtime: Runtime, folder: Path) -> str:
    """The folder of the bundle's tokenizer as the tools open it."""
    target = folder / "tokenizer"
    target.mkdir(exist_ok=True)
    (target / "tokenizer.json").write_bytes(runtime.bundle.read("tokenizer.json"))
    (target / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}', "utf-8")
    (target / "config.json").write_text('{"model_type": "llama"}', "utf-8")
    return str(target)


def guidellm(programs: Path, url: str, runtime: Runtime, folder: Path) -> list[str]:
    """What guidellm reports; raises AssertionError unless every request has tokens and an acceptance."""
    prompts, output = folder / "prompts.json", folder / "guidellm.json"
    prompts.write_text(json.dumps([{"prompt": one, "output_tokens_count": _OUTPUT} for one in _PROMPTS]), "utf-8")
    target = url.removesuffix("/v1")
    command = [str(programs / "guidellm"), "run", "--backend", f"kind=openai_http,target={target},model=model"]
    command += ["--profile", f"kind=concurrent,streams={_STREAMS}", "--data", f"kind=json_file,path={prompts}"]
    command += ["--constraint", f"kind=max_requests,count={_REQUESTS}", "--output", f"kind=json,path={output}"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={_tokenizer(runtime, folder)}", "--disable-progress"]
    run(command, folder, 240)
    (benchmark,) = json.loads(output.read_text("utf-8"))["benchmarks"]
    requests = benchmark["requests"]["successful"]
    assert len(requests) == _REQUESTS, f"{len(requests)} requests were answered, expected {_REQUESTS}"
    assert not benchmark["requests"]["errored"]
    drafts = [one["response_metrics"]["speculative_decoding"] for one in requests]
    assert all(one["output_tokens"] == _OUTPUT for one in requests)
    steps, accepted = (sum(one[name] for one in drafts) for name in ("num_spec_steps", "num_accepted_draft_tokens"))
    assert steps + accepted >= _REQUESTS * _OUTPUT
    return [f"{_REQUESTS} streams, {_STREAMS} at a time: acceptance length {1 + accepted / steps:.2f} in its report"]


def schemathesis(programs: Path, url: str, runtime: Runtime, folder: Path) -> list[str]:
    """What schemathesis reports; raises CommandFailed if a response is not as the OpenAPI document says."""
    rules = "positive_data_acceptance"  # left out: a schema cannot say that of two fields one is expected
    command = [str(programs / "schemathesis"), "run", f"{url.removesuffix('/v1')}/openapi.json"]
    options = "--workers 1 --max-time 90 -n 300 --phases examples,coverage,fuzzing --seed 1 --no-color"
    more = f"--max-response-time 30 --warnings off --exclude-checks {rules}"
    statuses = "[400, 401, 404, 413, 415]"  # 413: bodies of several megabytes, which no schema bounds
    rejection = f"[checks.negative_data_rejection]\nexpected-statuses = {statuses}\n"
    (folder / "schemathesis.toml").write_text(rejection, "utf-8")
    output = run([*command, *options.split(), *more.split()], folder, 150)
    found = re.search(r"(\d+) generated", output)
    assert found is not None, output[-2000:]
    assert int(found[1]) >= 1000, f"{found[1]} requests were sent, expected at least 1000"
    return [f"{found[1]} valid and invalid requests: no response that the document does not allow, no server error"]


CLIENTS: dict[str, Callable[[Path, str, Runtime, Path], list[str]]] = {
    "lm-eval": lm_eval,
    "guidellm": guidellm,
    "schemathesis": schemathesis,
}
