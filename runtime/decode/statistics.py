"""Statistics: counts and times of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from spaceport.runtime.decode.acceptance import Verdict
from spaceport.runtime.decode.plan import Part, Plan

MOST_STEPS = 4096  # decode steps that are counted one by one


@dataclass
class Statistics:
    """Counts and times of a request so far; a step in which the request failed adds its time only.

    - `prompt_tokens`: Number of prompt tokens.
    - `cached_tokens`: Number of prompt tokens whose KV rows were reused from the prefix cache.
    - `prompt_steps`: Prefill steps: they fed a part of the prompt and generated nothing.
    - `steps`: Decode steps: they generated at least one token.
    - `tokens`: Generated tokens of all threads.
    - `rows`: Rows of all steps, without padding.
    - `candidate_rows`: Of these, rows of candidates.
    - `mask_rows`: Of these, mask rows; all others are known tokens.
    - `padding_rows`: Rows that were computed beside them, since a call computes equally many for each of its requests.
    - `drafted_by_step`: Draft tokens that were fed in each decode step; of the first 4,096 steps only.
    - `accepted_by_step`: Accepted draft tokens of each of these steps.
    - `drafted_by_depth`: Draft tokens that were fed, by depth in the draft.
    - `accepted_by_depth`: Accepted draft tokens, by depth in the draft.
    - `drafted_by_source`: Draft tokens that were fed, by source: "mask", "head" or "lookup", and "mask+lookup" of tokens
      that both propose.
    - `accepted_by_source`: Accepted draft tokens, by source.
    - `drafts_limited`: Steps in which a thread's draft was narrower than its limits allow, by reason: "budget",
      "not_worth_it", "no_candidates", "grammar", "end_of_text", "row_limit" or "shared_call".
    - `threads`: Number of threads.
    - `peak_threads`: Maximum number of threads that decoded in one step.
    - `peak_slots`: Maximum number of KV slots in use.
    - `waiting_seconds`: Seconds in the queue, from the submission to the first step.
    - `engine_seconds`: Seconds in engine calls that the request took part in.
    - `outside_seconds`: Seconds between these calls, in Python code.
    - `first_token_seconds`: Time to first token: seconds from the submission, the queue included.
    - `seconds`: Seconds from the submission to the last step, the queue included.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    prompt_steps: int = 0
    steps: int = 0
    tokens: int = 0
    rows: int = 0
    candidate_rows: int = 0
    mask_rows: int = 0
    padding_rows: int = 0
    drafted_by_step: list[int] = field(default_factory=list, repr=False)
    accepted_by_step: list[int] = field(default_factory=list, repr=False)
    drafted_by_depth: list[int] = field(default_factory=list)
    accepted_by_depth: list[int] = field(default_factory=list)
    drafted_by_source: dict[str, int] = field(default_factory=dict)
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    drafts_limited: dict[str, int] = field(default_factory=dict)
    threads: int = 1
    peak_threads: int = 1
    peak_slots: int = 0
    waiting_seconds: float = 0.0
    engine_seconds: float = 0.0
    outside_seconds: float = 0.0
    first_token_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def tokens_per_step(self) -> float:
        """Generated tokens of all threads per decode step."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted draft tokens / draft tokens, siblings included; 0 without drafts."""
        drafted = sum(self.drafted_by_depth)
        return sum(self.accepted_by_depth) / drafted if drafted else 0.0

    @property
    def mean_acceptance_length(self) -> float | None:
        """1 + accepted draft tokens / decode steps; None with several threads, which share their steps."""
        if self.threads > 1 or not self.steps:
            return None
        return 1 + sum(self.accepted_by_depth) / self.steps

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens of all threads per second from the first step to the last one, prefill included."""
        running = self.seconds - self.waiting_seconds
        return self.tokens / running if running > 0 else 0.0

    def add_step(self, plan: Plan, verdicts: Sequence[Verdict], written: Sequence[int], held: int) -> None:
        """Count a step; `written` is the number of tokens that each part generated, `held` the KV slots in use."""
        self.rows += plan.rows
        self.peak_slots = max(self.peak_slots, held)
        self.peak_threads = max(self.peak_threads, len(plan.parts))
        writes = False
        drafted = accepted = 0
        for part, verdict, count in zip(plan.parts, verdicts, written, strict=True):
            writes = writes or bool(verdict.tokens)
            if (reason := part.draft.limited) is not None:
                self.drafts_limited[reason] = self.drafts_limited.get(reason, 0) + 1
            self.tokens += count
            layout = part.layout
            self.mask_rows += layout.mask_rows.size
            if layout.drafted:
                drafted += layout.candidates.size
                kept = min(count, verdict.accepted)
                accepted += kept
                self._add_drafts(part, verdict, kept)
        self.candidate_rows += drafted
        if writes and len(self.drafted_by_step) < MOST_STEPS:
            self.drafted_by_step.append(drafted)
            self.accepted_by_step.append(accepted)
        self.steps += writes
        self.prompt_steps += not writes

    def _add_drafts(self, part: Part, verdict: Verdict, accepted: int) -> None:
        drafted = part.layout.drafted
        missing = len(drafted) - len(self.drafted_by_depth)
        if missing > 0:
            self.drafted_by_depth += [0] * missing
            self.accepted_by_depth += [0] * missing
        for depth, count in enumerate(drafted):
            self.drafted_by_depth[depth] += count
        for depth in range(accepted):
            self.accepted_by_depth[depth] += 1
        for counts, sources in (
            (self.drafted_by_source, part.draft.sources),
            (self.accepted_by_source, verdict.sources[:accepted]),
        ):
            for source in sources:
                counts[source] = counts.get(source, 0) + 1
