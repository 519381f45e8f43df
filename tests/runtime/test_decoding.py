"""What may be asked of a completion, over a fake engine: limits, every option with every draft, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest

from spaceport.graphs.contract.draft_methods import DraftMethod, MaskLayout
from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.manifest import TokenIds
from spaceport.runtime.decode.sequence import Ending
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.limits import DEFAULT_LIMITS, Limits
from spaceport.runtime.sampling.grammar import Grammar
from spaceport.runtime.sampling.sampler import Sampling
from spaceport.runtime.scheduling.request_queue import QueueFull
from spaceport.runtime.session import Runtime
from spaceport.runtime.text.messages import characters_of
from spaceport.runtime.text.prompt import PromptEncoder
from support.hash_engine import CHILD, END, FORK, MASKS, Cell, Language
from support.hash_runtime import close_between_steps, hash_runtime, stepwise_runtime
from support.small_bundle import new_bundle

NESTED: dict[str, Any] = {"type": "string"}
for _ in range(70):
    NESTED = {"type": "array", "items": NESTED}

REFUSED: list[tuple[Decoding, str]] = [
    (Decoding(stop=["x"] * 17), "stop has 17 stop strings: expected at most 16; Limits.stop_strings=…. allows more"),
    (Decoding(stop=["x" * 1000] * 16), "a stop string has 1000 characters: expected at most 256; Limits.stop_chars"),
    (Decoding(logprobs=21), "logprobs is 21: expected at most 20; Limits.logprobs"),
    (Decoding(sampling=Sampling(logit_bias=dict.fromkeys(range(1025), 1.0))), "logit_bias has 1025 entries"),
    (Decoding(sampling=Sampling(banned=range(1025))), "banned has 1025 entries: expected at most 1024"),
    (Decoding(max_threads=33), "max_threads is 33: expected at most 32; Limits.threads"),
    (Decoding(max_depth=9), "max_depth is 9: expected at most 8; Limits.fork_depth"),
    (Decoding(grammar=Grammar(regex="a" * 70_000)), r"the grammar has 700\d\d characters: expected at most 65536"),
    (Decoding(grammar=Grammar(regex="(" * 70 + "a" + ")" * 70)), "the grammar has 70 nested levels"),
    (Decoding(grammar=Grammar(json_schema=NESTED)), "the grammar has 71 nested levels: expected at most 64"),
]


@pytest.mark.parametrize(("decoding", "message"), REFUSED)
def test_options_beyond_the_defaults_are_refused(decoding: Decoding, message: str) -> None:
    DEFAULT_LIMITS.check_decoding(Decoding(stop=["x" * 256] * 16, logprobs=20))
    with pytest.raises(OptionFault, match=message):
        DEFAULT_LIMITS.check_decoding(decoding)
    raised: dict[str, int] = {
        "stop_strings": 17,
        "stop_chars": 1000,
        "logprobs": 21,
        "bias_entries": 1025,
        "threads": 128,
    }
    more = {"banned_tokens": 1025, "fork_depth": 9, "grammar_chars": 100_000, "grammar_depth": 100}
    Limits(**raised, **more).check_decoding(decoding)


@pytest.mark.parametrize("name", [field.name for field in fields(Limits)])
def test_a_limit_is_a_whole_number(name: str) -> None:
    for value in (-1, 1.5, "4", True):
        with pytest.raises(OptionFault, match=f"{name} is {value!r}: expected a whole number of at least [01]"):
            Limits(**{name: value})  # type: ignore[arg-type]


class Endless(Sequence[Any]):
    """A sequence that yields the same item for ever, and says that it has a few."""

    def __init__(self, item: object, length: int) -> None:
        self.item, self.length = item, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        return self.item

    def __iter__(self) -> Iterator[Any]:
        return repeat(self.item)


PARTS = [{"type": "text", "text": "a" * 20}] * 3
TOO_LONG: list[tuple[object, dict[str, int], str]] = [
    ("a" * 41, {"prompt_chars": 40}, "the prompt has 41 characters or more: expected at most 40"),
    ([{"role": "user", "content": "a" * 41}], {"prompt_chars": 40}, "characters or more: expected at most 40"),
    ([{"role": "user", "content": PARTS}], {"prompt_chars": 40}, "characters or more: expected at most 40"),
    (list(range(6)), {"prompt_tokens": 5}, "the prompt has 6 items: expected at most 5"),
    ("abcdef", {"prompt_tokens": 5}, "the prompt has 6 tokens: expected at most 5; Limits.prompt_tokens"),
    ("a" + " " * 12_000_000 + "b", {}, "the prompt has 12000002 characters or more"),  # it is not tokenized
    (range(10**15), {}, r"the prompt has 10+ items: expected at most 1048576 token ids or mess"),
    (Endless(1, 10**12), {}, r"the prompt has 10+ items: expected at most 1048576 token ids or mess"),
    (Endless({"role": "user", "content": "a"}, 10**12), {}, r"the prompt has 10+ items: expected at most 1048576"),
    (repeat(1), {}, "expected text, token ids or chat mess"),  # an iterator is not read
]


@pytest.mark.parametrize(("prompt", "limits", "message"), TOO_LONG, ids=range(len(TOO_LONG)))
def test_a_long_prompt_is_refused_at_once(prompt: Any, limits: dict[str, int], message: str) -> None:
    with hash_runtime(Language(3), limits=Limits(**limits)) as runtime:
        calls: list[Callable[[Any], object]] = [runtime.generate, runtime.stream, runtime.score, runtime.tokens_of]
        for call in calls:
            with pytest.raises(OptionFault, match=message):
                call(prompt)


def test_scores_are_limited_too() -> None:
    with hash_runtime(Language(3), limits=Limits(logprobs=2, prompt_chars=40)) as runtime:
        with pytest.raises(OptionFault, match="top is 3: expected at most 2"):
            runtime.score("ab", top=3)
        with pytest.raises(OptionFault, match="the prompt has 41 characters or more"):
            runtime.score("a", "b" * 41)


@pytest.mark.parametrize("waiting", [(4, 6), (20,)])  # prompt tokens: exactly the limit, and a single one may have more
def test_prompt_tokens_of_waiting_requests_are_limited(waiting: tuple[int, ...]) -> None:
    runtime, engine = stepwise_runtime(Language(3, end_every=10**9), limits=Limits(queued_prompt_tokens=10))
    streams = [runtime.stream([1, 2, 3])]
    engine.wait()
    streams += [runtime.stream([1] * tokens) for tokens in waiting]
    message = f"have {sum(waiting) + 1} prompt tokens, queued_prompt_tokens is 10: try again later, or raise"
    with pytest.raises(QueueFull, match=message):
        runtime.stream([1])
    close_between_steps(runtime, engine)
    del streams


def test_an_absurd_number_of_cpu_threads_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionFault, match="threads is 999: expected 0 "):
        Runtime.open(new_bundle(tmp_path / "bundle"), backend="onnxruntime", threads=999)


def test_characters_are_counted_until_there_are_too_many() -> None:
    shared: list[Any] = ["a"]
    for _ in range(40):  # 2**40 texts
        shared = [shared, shared]
    assert 100 < characters_of(shared, 100) < 200
    assert characters_of([{"role": "user", "content": "abc"}], 100) == 4 + 4 + 7 + 3 + 2
    for content in ([1, "x" * 99], [""] * 99, [None] * 99, {"a": [0] * 99}):
        assert characters_of([{"role": "user", "content": content}], 80) > 80


PROMPT = [1, 2, 3]
LIMIT = 30  # tokens of a thread, prompt included
Found = dict[tuple[int, ...], tuple[list[int], Ending]]

OPTIONS: list[dict[str, Any]] = [
    {"stop_token_ids": (4,)},
    {"stop_token_ids": (4, 7, END)},
    {"min_tokens": 6},
    {"min_tokens": 6, "stop_token_ids": (2, 4)},
    {"ignore_eos": True},
    {"ignore_eos": True, "stop_token_ids": (5, END), "min_tokens": 4},
    {"stop_token_ids": (FORK,)},
]
DRAFTS: list[dict[str, Any]] = [
    {"mask_slots": 0},
    {},
    {"draft": "chain"},
    {"mask_slots": 0, "lookup": 8},
    {"draft_rows": 40, "max_threads": 1},
]


def plain(
    language: Language, tokens: Sequence[int], depth: int, options: Decoding, path: tuple[int, ...] = ()
) -> Found:
    """The output of every thread, token by token, without engine, drafts and shared steps."""
    cells: list[Cell] = []
    for token in tokens:
        cells.append(language.follow(cells, token))
    text: list[int] = []
    found: Found = {path: (text, "length")}
    ends = {*(() if options.ignore_eos else (END,))}
    while len(cells) < LIMIT:
        logits = language.logits(cells[-1].state)
        logits[[*MASKS, CHILD]] = -1
        if len(path) >= depth or cells[-1].token in (FORK, CHILD):
            logits[FORK] = -1
        if len(cells) < len(PROMPT) + options.min_tokens:
            logits[[*ends, *options.stop_token_ids]] = -1
        token = int(logits.argmax())
        if token in ends or token in options.stop_token_ids:
            found[path] = (text, "end" if token in ends else "stop")
            break
        text.append(token)
        cells.append(language.follow(cells, token))
        if token == FORK:
            child = (*path, text.count(FORK) - 1)
            found |= plain(language, [*(cell.token for cell in cells), CHILD], depth, options, child)
    return found


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_thread_is_that_of_plain_decoding(options: dict[str, Any]) -> None:
    endings: set[str] = set()
    threads = 0
    for seed, drafts in enumerate(DRAFTS * 2):
        language = Language(seed, (100, 60)[seed % 2], end_every=6, fork_every=9)
        with hash_runtime(language, max_seq_len=LIMIT, max_slots=1000) as runtime:
            decoding = Decoding(fork=True, max_depth=2, **options, **drafts)
            completion = runtime.generate(PROMPT, decoding)
        found = {thread.path: (list(thread.tokens), thread.ending) for thread in completion.threads}
        assert found == plain(language, PROMPT, 2, decoding)
        endings |= {ending for _, ending in found.values()}
        threads += len(found)
    assert ("stop" in endings) == ("stop_token_ids" in options)
    assert ("end" in endings) == (not options.get("ignore_eos"))
    assert threads > 10 or FORK in options.get("stop_token_ids", ())


def test_a_completion_tells_its_seed_its_times_and_its_trace() -> None:
    drawn = Decoding(sampling=Sampling(temperature=1.0))
    with hash_runtime(Language(3, end_every=10**9)) as runtime:
        first, other = runtime.generate(PROMPT, drawn), runtime.generate(PROMPT, drawn)
        again = runtime.generate(PROMPT, Decoding(sampling=Sampling(temperature=1.0, seed=first.seed)))
        assert (again.tokens, again.seed) == (first.tokens, first.seed)
        assert other.seed != first.seed
        with runtime.stream(PROMPT, Decoding(trace=True)) as stream:
            assert stream.statistics.tokens_per_second == 0.0
            completion = stream.completion()
        found = completion.statistics
        assert 0 < found.waiting_seconds < found.first_token_seconds < found.seconds
        assert found.engine_seconds + found.outside_seconds <= found.seconds - found.waiting_seconds + 0.001
        assert found.tokens_per_second == pytest.approx(found.tokens / (found.seconds - found.waiting_seconds))
        assert completion.trace is not None
        record = completion.trace.record(runtime.tokenizer)
        assert sum(map(len, record.generated)) == len(completion.tokens)
        assert len(record.steps) == found.steps + found.prompt_steps
        only = runtime.generate(PROMPT, Decoding(max_tokens=1))
        assert only.statistics.first_token_seconds == only.statistics.seconds
        assert (only.trace, only.seed) == (None, None)


def test_a_draft_may_verify_all_mask_slots_and_have_them_behind_one_token() -> None:
    block = MaskLayout(shift=False, group="block")
    assert (
        Decoding().draft_config(DraftMethod(max_tokens=5)).rows
        == Decoding().draft_config(DraftMethod(max_tokens=11, layout=block)).rows
        == 24
    )
    assert Decoding().draft_config(DraftMethod(max_tokens=30)).rows == 61
    assert Decoding().draft_config(DraftMethod(max_tokens=30, layout=block)).rows == 62
    assert Decoding(draft_rows=9).draft_config(DraftMethod(max_tokens=30, layout=block)).rows == 9


INVALID: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens is 0: expected a whole number of at least 1"),
    ({"max_depth": -1}, "max_depth is -1: expected a whole number of at least 0"),
    ({"max_threads": 129}, "max_threads is 129: expected a whole number from 1 to 128"),
    ({"timeout": 0.0}, "timeout is 0.0: expected a number of seconds above 0"),
    ({"timeout": float("nan")}, "timeout is nan: expected a number of seconds above 0"),
    ({"stop": [""]}, "expected strings of at least one character"),
    ({"draft": "bush"}, "draft is 'bush': expected chain or tree"),
    ({"draft_rows": 0}, "draft_rows is 0: expected a whole number of at least 1"),
    ({"draft_siblings": 0}, "draft_siblings is 0: expected a whole number of at least 1"),
    ({"lookup": -1}, "lookup is -1: expected a whole number of at least 0"),
    ({"draft": "chain", "lookup": 3}, "lookup is 3 with draft='chain': it applies to draft='tree' only"),
    ({"max_tokens": 5.5}, "max_tokens is 5.5: expected a whole number"),
    ({"logprobs": 1.5}, "logprobs is 1.5: expected a whole number"),
    ({"stop": 5}, "stop is 5: expected strings"),
    ({"fork": "no"}, "fork is 'no': expected True, False or None"),
    ({"sampling": 0.7}, "sampling is 0.7: expected a Sampling"),
    ({"grammar": "[a-z]"}, r"grammar is .* expected a Grammar"),
    ({"fork": True, "grammar": Grammar(regex="a")}, "fork is True with a grammar: a constrained completion cannot"),
    ({"stop_token_ids": (True,)}, "expected token ids"),
    ({"stop_token_ids": (-1,)}, "expected token ids"),
    ({"min_tokens": -1}, "min_tokens is -1: expected a whole number of at least 0"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens is 9: expected at most max_tokens, 8"),
    ({"ignore_eos": 1}, "ignore_eos is 1: expected True or False"),
    ({"ignore_eos": True, "grammar": Grammar(regex="a")}, "ignore_eos is True with a grammar"),
    ({"cache_salt": "x" * 257}, "cache_salt has 257 characters: expected at most 256"),
]


@pytest.mark.parametrize(("asked", "reported"), INVALID)
def test_what_cannot_be_meant_is_refused_at_once(asked: dict[str, Any], reported: str) -> None:
    with pytest.raises(OptionFault, match=reported):
        Decoding(**asked)


def test_more_tokens_than_the_context_has_are_lowered_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    endless = Language(3, end_every=10**9)
    with hash_runtime(endless) as runtime, caplog.at_level("INFO", "spaceport.runtime"):
        asked, unlimited = (runtime.generate(PROMPT, Decoding(max_tokens=count)) for count in (10**6, None))
        free = runtime.max_seq_len - len(runtime.tokens_of(PROMPT))
    assert (asked.tokens, asked.ending, len(asked.tokens)) == (unlimited.tokens, "length", free)
    (entry,) = (entry.getMessage() for entry in caplog.records if "lowered" in entry.getMessage())
    assert entry == f"max_tokens 1000000 is lowered to {free}: max_seq_len is {runtime.max_seq_len}"


def test_what_a_bundle_cannot_do_is_refused_before_anything_is_written() -> None:
    with hash_runtime(Language(1)) as runtime:
        options: list[tuple[dict[str, Any], str]] = [
            ({"max_total_tokens": 500}, "lower max_total_tokens to"),
            ({"mask_slots": 6}, "mask_slots is 6: expected 0 to 5"),
            ({"sampling": Sampling(banned=(10**6,))}, "banned holds the token id 1000000: expected ids from 0 to"),
            ({"stop_token_ids": (15,)}, "stop_token_ids holds the token id 15: expected ids from 0 to 14"),
        ]
        for asked, reported in options:
            with pytest.raises(OptionFault, match=reported):
                runtime.stream(PROMPT, Decoding(**asked))
        prompts: list[Any] = [5, None, b"abc", [True, 2], "", [], [1.5], {"role": "user"}]
        for prompt in (*prompts, [5, {"role": "user", "content": "a"}]):
            with pytest.raises(OptionFault, match="expected"):
                runtime.stream(prompt)
        with pytest.raises(OptionFault, match=r"decoding is \{'max_tokens': 3\}: expected a Decoding"):
            runtime.stream(PROMPT, {"max_tokens": 3})  # type: ignore[arg-type]
        manifest = replace(runtime.bundle.manifest, tokens=TokenIds(mask=MASKS, end=(END,)))
        line = Runtime(replace(runtime.bundle, manifest=manifest), runtime.engine, 64)
        with pytest.raises(OptionFault, match="expected a bundle with a fork token, this one has none"):
            line.stream(PROMPT, Decoding(fork=True))
        limited = Runtime(runtime.bundle, runtime.engine, 64, limits=Limits(banned_tokens=2))
        with pytest.raises(OptionFault, match="stop_token_ids has 3 entries: expected at most 2"):
            limited.generate(PROMPT, Decoding(stop_token_ids=(1, 2, 3)))
        assert runtime.generate(PROMPT, Decoding(max_tokens=1)).statistics.tokens == 1


def test_what_fills_a_gap_ends_at_the_tokens_that_its_prompt_brings(monkeypatch: pytest.MonkeyPatch) -> None:
    with hash_runtime(Language(3)) as runtime:
        whole = runtime.generate("abc", Decoding(max_tokens=12, ignore_eos=True, fork=False)).tokens
        end = whole[5]
        monkeypatch.setattr(PromptEncoder, "ends_of", lambda self, prompt: (end,))
        filled = runtime.generate("abc", Decoding(max_tokens=12, ignore_eos=True, fork=False))
    assert filled.tokens == whole[: whole.index(end)]
    assert filled.ending == "stop"
