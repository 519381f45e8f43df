"""From a prompt to text on the trained checkpoint: golden texts, pinned numbers of steps, every backend and k."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spaceport.runtime.backends import open_engine
from spaceport.runtime.backends.engine_options import EngineOptions
from spaceport.runtime.bundle import open_bundle
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.scheduling.capacity import capacity_for
from spaceport.runtime.scheduling.generation import Completion
from spaceport.runtime.scheduling.worker import RuntimeClosed
from spaceport.runtime.session import Runtime
from spaceport.tools.reference import open_reference_runtime
from support.paths import TINY

PROMPTS: dict[str, str] = json.loads((TINY / "prompts.json").read_text("utf-8"))
DECODER, SCANNER, FOREIGN = PROMPTS.values()

GOLDEN = (
    ":\n    c_scanstring = None\n\n__all__ = ['JSONDecoder', 'JSONDecodeError']\n\n"
    "FLAGS = re.VERBOSE | re.MULTILINE | re.DOTALL\n\nNaN = float('nan')\nPosInf = float('inf')\nNegInf = float('-in"
)
GOLDEN_END = (
    "\n        finally:\n            memo.clear()\n\n    return scan_once\n\n"
    "make_scanner = c_make_scanner or py_make_scanner\n"
)


def chain(mask_slots: int, max_tokens: int = 96) -> Decoding:
    """Drafts whose number of steps does not depend on step costs."""
    return Decoding(max_tokens=max_tokens, mask_slots=mask_slots, draft="chain")


@pytest.fixture(scope="module", params=["onnxruntime scatter", "onnxruntime append", "onnxruntime int8", "torch"])
def runtime(
    request: pytest.FixtureRequest, tiny_bundle: Path, tiny_append_bundle: Path, tiny_int8_bundle: Path
) -> Iterator[Runtime]:
    if request.param == "torch":
        opened = open_reference_runtime(open_bundle(tiny_bundle), TINY, 512)
    else:
        bundles = {"scatter": tiny_bundle, "append": tiny_append_bundle, "int8": tiny_int8_bundle}
        opened = Runtime.open(bundles[request.param.split()[-1]], max_seq_len=512, threads=1, step_costs="standard")
    with opened:
        yield opened


@pytest.mark.parametrize(("mask_slots", "steps"), [(0, 96), (1, 49), (2, 33), (3, 25), (4, 20), (5, 18)])
def test_the_golden_text_takes_the_pinned_number_of_steps(runtime: Runtime, mask_slots: int, steps: int) -> None:
    found = runtime.generate(DECODER, chain(mask_slots))
    assert found.text == GOLDEN
    assert (found.ending, len(found.tokens)) == ("length", 96)
    assert found.statistics.steps == steps
    assert sum(found.statistics.accepted_by_depth) == 96 - steps


@pytest.mark.parametrize(("mask_slots", "steps"), [(0, 49), (1, 27), (2, 19), (3, 15), (4, 12), (5, 11)])
def test_the_end_of_text_ends_it_where_plain_decoding_would(runtime: Runtime, mask_slots: int, steps: int) -> None:
    found = runtime.generate(SCANNER, chain(mask_slots))
    assert found.text == GOLDEN_END
    assert (found.ending, len(found.tokens)) == ("end", 48)
    assert found.statistics.steps == steps


def test_foreign_text_is_the_same_with_drafts_that_hardly_help(runtime: Runtime) -> None:
    plain = runtime.generate(FOREIGN, Decoding(max_tokens=96, mask_slots=0))
    for mask_slots in range(1, 6):
        drafted = runtime.generate(FOREIGN, chain(mask_slots))
        assert drafted.tokens == plain.tokens
        assert 1.0 <= drafted.statistics.tokens_per_step < 1.3


def test_a_chat_goes_through_the_models_template(runtime: Runtime) -> None:
    """The template writes `<s>` itself, and the text ends at the second of two end tokens."""
    messages = [{"role": "user", "content": "How does json/scanner.py begin?"}]
    found = runtime.generate(messages, Decoding(max_tokens=96))
    assert found.text.startswith('"""JSON token scanner\n"""\nimport re\n')
    assert found.ending == "end"
    assert found.prompt_tokens.count(0) == 1
    assert found.prompt_tokens[0] == 0
    assert found.tokens == runtime.generate(messages, Decoding(max_tokens=96, mask_slots=0)).tokens


@pytest.mark.parametrize("chunk", [1, 7, 48, 512])
def test_a_prompt_fed_in_chunks_leads_to_the_same_text(any_tiny_bundle: Path, chunk: int) -> None:
    bundle = open_bundle(any_tiny_bundle)
    engine = open_engine(bundle, "auto", EngineOptions(capacity_for(bundle.manifest, 512), 1))
    with Runtime(bundle, engine, 512, prompt_rows=chunk) as opened:
        found = opened.generate(DECODER, chain(5))
    assert found.text == GOLDEN
    assert found.statistics.prompt_steps == -(-found.statistics.prompt_tokens // chunk) - 1
    assert found.statistics.steps == 18


@pytest.mark.parametrize("stop", ["JSONDecodeError", "\n\n", "_scan", "FLAGS = re.V", "', '", "N"])
def test_a_stop_string_cuts_the_text_where_plain_decoding_would(runtime: Runtime, stop: str) -> None:
    plain = runtime.generate(DECODER, Decoding(max_tokens=96, mask_slots=0, stop=[stop]))
    assert plain.text == GOLDEN[: GOLDEN.index(stop)]
    assert plain.ending == "stop"
    for mask_slots in (1, 3, 5):
        drafted = runtime.generate(DECODER, Decoding(max_tokens=96, mask_slots=mask_slots, stop=[stop]))
        assert (drafted.text, drafted.tokens, drafted.ending) == (plain.text, plain.tokens, plain.ending)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, 11, 30])
def test_the_token_limit_holds_to_the_token(runtime: Runtime, max_tokens: int) -> None:
    whole = runtime.generate(DECODER, Decoding(max_tokens=96, mask_slots=0))
    for mask_slots in (0, 2, 5):
        found = runtime.generate(DECODER, Decoding(max_tokens=max_tokens, mask_slots=mask_slots))
        assert found.tokens == whole.tokens[:max_tokens]
        assert found.ending == "length"


def test_a_text_ends_at_max_seq_len_whatever_is_drafted(tiny_bundle: Path) -> None:
    with Runtime.open(tiny_bundle, max_seq_len=64, threads=1) as opened:
        texts = {opened.generate(DECODER, Decoding(mask_slots=k)).tokens for k in range(6)}
        (tokens,) = texts
        assert len(tokens) == 64 - len(opened.tokens_of(DECODER))


def test_pieces_make_up_the_text_and_mark_accepted_draft_tokens(runtime: Runtime) -> None:
    with runtime.stream(DECODER, chain(5)) as stream:
        pieces = list(stream)
        found = stream.completion()
    assert "".join(piece.text for piece in pieces) == found.text == GOLDEN
    assert "".join(piece.reading for piece in pieces) == GOLDEN
    assert tuple(piece.token for piece in pieces) == found.tokens
    assert sum(piece.drafted for piece in pieces) == sum(found.statistics.accepted_by_depth) == 78
    assert all((piece.source is not None) == piece.drafted for piece in pieces)
    assert not any(piece.drafted for piece in runtime.stream(DECODER, Decoding(max_tokens=20, mask_slots=0)))


@pytest.mark.parametrize("stop", [(), ("never in the text",)])
def test_pieces_say_what_proposed_their_tokens(runtime: Runtime, stop: tuple[str, ...]) -> None:
    with runtime.stream(DECODER, Decoding(max_tokens=96, lookup=8, mask_slots=2, stop=stop)) as stream:
        counted = Counter(piece.source for piece in stream if piece.drafted)
        found = stream.completion().statistics.accepted_by_source
    assert counted == found
    assert len(found) > 1


@pytest.mark.parametrize(
    "draft_config", [{}, {"draft": "chain"}, {"draft_rows": 4}, {"draft_siblings": 1}, {"lookup": 8}]
)
def test_no_way_of_drafting_changes_a_text(runtime: Runtime, draft_config: dict[str, Any]) -> None:
    for prompt in PROMPTS.values():
        plain = runtime.generate(prompt, Decoding(max_tokens=60, mask_slots=0))
        drafted = runtime.generate(prompt, Decoding(max_tokens=60, **draft_config))
        assert (drafted.text, drafted.tokens, drafted.ending) == (plain.text, plain.tokens, plain.ending)


def test_what_is_looked_up_needs_no_mask_slots(runtime: Runtime) -> None:
    found = runtime.generate(DECODER, Decoding(max_tokens=96, mask_slots=0, lookup=8))
    assert found.text == GOLDEN
    assert found.statistics.steps < 96
    assert set(found.statistics.accepted_by_source) == {"lookup"}


def test_a_second_text_waits_for_the_first(runtime: Runtime) -> None:
    first = runtime.stream(DECODER, Decoding(max_tokens=96))
    second = runtime.generate(SCANNER, Decoding(max_tokens=96))
    assert second.text == GOLDEN_END
    assert second.statistics.waiting_seconds > 0
    assert first.completion().text == GOLDEN


def test_a_stream_closed_early_ends_where_it_is_and_the_next_text_is_untouched(runtime: Runtime) -> None:
    stream = runtime.stream(
        DECODER, Decoding(mask_slots=0)
    )  # one token per step: it is not complete before it is closed
    next(stream)
    stream.close()
    assert runtime.generate(SCANNER, Decoding(max_tokens=96)).text == GOLDEN_END
    whole, found = runtime.generate(DECODER), stream.completion()
    assert found.ending == "cancelled"
    assert 0 < len(found.tokens) < len(whole.tokens)
    assert whole.text.startswith(found.text)
    assert whole.tokens[: len(found.tokens)] == found.tokens


def test_texts_one_after_the_other_do_not_touch_each_other(runtime: Runtime) -> None:
    def texts() -> list[Completion]:
        return [
            runtime.generate(prompt, Decoding(max_tokens=40, mask_slots=k))
            for k in (5, 0, 2)
            for prompt in PROMPTS.values()
        ]

    first, second = texts(), texts()
    assert [one.tokens for one in first] == [other.tokens for other in second]
    assert first[0].tokens == first[3].tokens == first[6].tokens


def test_token_ids_and_text_are_the_same_prompt(runtime: Runtime) -> None:
    ids = runtime.tokens_of(DECODER)
    assert runtime.generate(ids, Decoding(max_tokens=96)).text == GOLDEN


def test_a_closed_runtime_says_so(tiny_bundle: Path) -> None:
    runtime = Runtime.open(tiny_bundle, max_seq_len=64)
    runtime.close()
    with pytest.raises(RuntimeClosed, match="the runtime is closed"):
        runtime.generate("x")


def test_kv_buffers_are_bound_when_their_length_changes_and_not_in_each_step(tiny_bundle: Path) -> None:
    with Runtime.open(tiny_bundle, max_seq_len=512, threads=1) as opened:
        engine = opened.engine
        binding, bound = engine._binding, []  # type: ignore[attr-defined]

        class Spy:
            def __getattr__(self, name: str) -> object:
                if name in ("bind_input", "bind_output"):
                    bound.append(name)
                return getattr(binding, name)

        engine._binding = Spy()  # type: ignore[attr-defined]
        engine._session = Unwrapping(engine._session, binding)  # type: ignore[attr-defined]
        opened.generate(DECODER, Decoding(max_tokens=96, mask_slots=0))
        # 3 layers x key and value, each in and out; logits for one row at most once
        assert bound.count("bind_input") in (6, 12, 18)
        assert bound.count("bind_output") - bound.count("bind_input") in (0, 1)


class Unwrapping:
    """A session that runs the binding behind the spy."""

    def __init__(self, session: object, binding: object) -> None:
        self._session, self._binding = session, binding

    def run_with_iobinding(self, spy: object) -> None:
        self._session.run_with_iobinding(self._binding)  # type: ignore[attr-defined]
