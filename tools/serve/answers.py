"""Answers: completions as the objects of OpenAI's API."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from spaceport.runtime.decode.sequence import Ending
from spaceport.runtime.decode.statistics import Statistics
from spaceport.runtime.sampling.logprobs import TokenLogprob
from spaceport.runtime.scheduling.request import Completion

_REASONS: dict[Ending, str] = {"end": "stop", "stop": "stop"}  # all others: "length"


def finish_reason(ending: Ending, has_calls: bool = False) -> str:
    """Why an answer ended, in the words of OpenAI's API."""
    reason = _REASONS.get(ending, "length")
    return "tool_calls" if has_calls and reason == "stop" else reason


def usage_of(prompts: Sequence[Statistics], found: Sequence[Statistics]) -> dict[str, Any]:
    """Tokens of the prompts, each counted once, and of all choices."""
    prompt_tokens = sum(one.prompt_tokens for one in prompts)
    written = sum(one.tokens for one in found)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": written,
        "total_tokens": prompt_tokens + written,
        "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in prompts)},
    }


def metrics_of(found: Sequence[Statistics]) -> dict[str, Any]:
    """Drafts and times of a request: counts of all choices, times of the slowest."""
    steps = sum(one.steps for one in found)
    drafted = sum(sum(one.drafted_by_depth) for one in found)
    accepted = sum(sum(one.accepted_by_depth) for one in found)
    tokens = sum(one.tokens for one in found)
    first = max(one.first_token_seconds for one in found)
    waiting = max(one.waiting_seconds for one in found)
    seconds = max(one.seconds for one in found)
    decoding = max(seconds - first, 0.0)
    return {
        "speculative_decoding": {
            "mean_acceptance_length": 1 + accepted / steps if steps else 0.0,
            "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
            "acceptance_histogram": _histogram(found),
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafted,
            **_by_step(found),
        },
        "time_to_first_token_ms": first * 1e3,
        "generation_time_ms": seconds * 1e3,
        "queue_time_ms": waiting * 1e3,
        "mean_itl_ms": decoding * 1e3 / max(1, tokens - 1),
        "tokens_per_second": tokens / (seconds - waiting) if seconds > waiting else 0.0,
    }


def timings_of(found: Sequence[Statistics]) -> dict[str, Any]:
    """The same in the words of llama.cpp."""
    whole = metrics_of(found)
    drafts, tokens = whole["speculative_decoding"], sum(one.tokens for one in found)
    prompt = max(whole["time_to_first_token_ms"] - whole["queue_time_ms"], 0.0)
    written = max(whole["generation_time_ms"] - whole["time_to_first_token_ms"], 0.0)
    return {
        "prompt_n": max(one.prompt_tokens for one in found),
        "prompt_ms": prompt,
        "predicted_n": tokens,
        "predicted_ms": written,
        "predicted_per_second": tokens / written * 1e3 if written else 0.0,
        "draft_n": drafts["num_draft_tokens"],
        "draft_n_accepted": drafts["num_accepted_draft_tokens"],
    }


def chat_logprobs(found: Iterable[TokenLogprob]) -> dict[str, Any]:
    """Log probabilities as a chat answer has them."""
    return {"content": [{**_one(each), "top_logprobs": [_one(top) for top in each.top]} for each in found]}


def text_logprobs(found: Sequence[TokenLogprob | None], texts: Sequence[str], start: int = 0) -> dict[str, Any]:
    """Log probabilities as a text answer has them; None for the first token of an echoed prompt."""
    offsets, at = [], start
    for text in texts:
        offsets.append(at)
        at += len(text)
    return {
        "text_offset": offsets,
        "token_logprobs": [None if each is None else each.logprob for each in found],
        "tokens": list(texts),
        "top_logprobs": [None if each is None else {top.text: top.logprob for top in each.top} for each in found],
    }


def own_report(completion: Completion) -> dict[str, Any]:
    """What only this service reports about a choice: why it ended, and the text of each thread of a forked one."""
    report: dict[str, Any] = {"ending": completion.ending, "seed": completion.seed}
    if len(completion.threads) > 1:
        report["threads"] = [
            {"path": list(one.path), "text": one.text, "ending": one.ending, "tokens": len(one.tokens)}
            for one in completion.threads
        ]
    return report


def _one(each: TokenLogprob) -> dict[str, Any]:
    return {"token": each.text, "logprob": each.logprob, "bytes": list(each.bytes)}


def _by_step(found: Sequence[Statistics]) -> dict[str, list[int]]:
    """Draft tokens of each decode step, as vLLM reports them: of one choice, with as many entries as steps."""
    if len(found) != 1 or len(found[0].drafted_by_step) != found[0].steps:
        return {}
    return {"per_step_accepted": found[0].accepted_by_step, "per_step_drafted": found[0].drafted_by_step}


def _histogram(found: Sequence[Statistics]) -> list[int]:
    """Steps by the number of draft tokens that they accepted, from none on."""
    if all(len(one.accepted_by_step) == one.steps for one in found):
        counts = Counter(accepted for one in found for accepted in one.accepted_by_step)
        return [counts[accepted] for accepted in range(max(counts, default=0) + 1)]
    deepest = max(len(one.accepted_by_depth) for one in found)
    reached = [sum(one.steps for one in found)]  # steps that accepted at least this many tokens
    reached += [
        sum(one.accepted_by_depth[depth] for one in found if depth < len(one.accepted_by_depth))
        for depth in range(deepest)
    ]
    return [max(0, here - further) for here, further in zip(reached, [*reached[1:], 0], strict=True)]
