"""Loads: guidellm, which reads the acceptance of drafts from the answers, and schemathesis with hostile bodies."""

from __future__ import annotations

import json
import re
from pathlib import Path

from real_clients.environments import run
from spaceport.runtime.session import Runtime

_PROMPTS = tuple(f"Write {number} sentences about the sea." for number in range(2, 14))
_REQUESTS, _STREAMS, _TOKENS = 12, 4, 16


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
    prompts.write_text(json.dumps([{"prompt": one, "output_tokens_count": _TOKENS} for one in _PROMPTS]), "utf-8")
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
    assert all(one["output_tokens"] == _TOKENS for one in requests)
    steps, accepted = (sum(one[name] for one in drafts) for name in ("num_spec_steps", "num_accepted_draft_tokens"))
    assert steps + accepted >= _REQUESTS * _TOKENS
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
