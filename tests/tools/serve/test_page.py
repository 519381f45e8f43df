"""Page of a service in a real Chromium: what it shows is what the model did, and it loads nothing from elsewhere."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from time import sleep
from typing import Any

import pytest

from spaceport.graphs.contract.manifest import TEMPLATE_FILE
from spaceport.runtime.decode.draft import REASONS
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.engine import Batch
from spaceport.runtime.session import Runtime
from spaceport.runtime.trace.reader import trace_of
from spaceport.tools.report.files import write_trace
from spaceport.tools.report.numbers import statistics_of
from spaceport.tools.report.words import visible
from spaceport.tools.serve.options import ServiceOptions
from support.browser import open_browser
from support.paths import DEMO
from support.running_service import RunningService, running_service
from support.small_bundle import edit
from support.traced import TOKENIZER, Case, traced

pytestmark = pytest.mark.slow

PROMPTS = json.loads((DEMO / "prompts.json").read_text("utf-8"))
QUESTION = PROMPTS["triangular"]["user"]
TOKENS = 60
KEY = "sk-page"
SENT = '#send:has-text("Send")'


def root_of(service: RunningService) -> str:
    return service.url.removesuffix("/v1")


class Visit:
    """A page of the service in a browser, with everything that it complained about and loaded."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        self.page = self.context.new_page()
        self.page.set_default_timeout(15_000)
        self.complaints: list[str] = []
        self.requested: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requested.append(request.url))
        self.page.goto(url)

    def ask(self, text: str, model: str = "demo", **settings: str | bool) -> None:
        """Set what is given in the settings, and ask."""
        self.page.select_option("#model", model)
        self.page.click("#options")
        for name, value in {"max-tokens": str(TOKENS), **settings}.items():
            if isinstance(value, bool):
                self.page.set_checked(f"#{name}", value)
            else:
                self.page.fill(f"#{name}", value)
        self.page.click("text=Done")
        self.page.fill("#prompt", text)
        turns = self.page.locator("#turns > li")
        before = turns.count()
        self.page.keyboard.press("Enter")
        turns.nth(before).wait_for()  # "Stop" may be gone again: short answers take milliseconds

    def finish(self) -> None:
        """Wait until nothing runs."""
        self.page.locator(SENT).wait_for()

    def texts(self, selector: str) -> list[str]:
        return list(self.page.locator(selector).all_inner_texts())


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as found:
        yield found


@pytest.fixture(scope="module")
def service(demo_bundle: Path) -> Iterator[RunningService]:
    opener = partial(Runtime.open, demo_bundle, max_requests=4, prefix_cache=True, step_costs="free")
    with running_service({"demo": opener, "slow": partial(opened_slowly, demo_bundle)}) as found:
        yield found


def opened_slowly(bundle: Path) -> Runtime:
    """A runtime whose steps take long enough to be watched."""
    runtime = Runtime.open(bundle, step_costs="free")
    run = runtime.engine.run

    def slow(batch: Batch) -> Any:
        sleep(0.1)
        return run(batch)

    runtime.engine.run = slow  # type: ignore[method-assign]
    return runtime


@pytest.fixture(scope="module")
def runtime(demo_bundle: Path) -> Iterator[Runtime]:
    with Runtime.open(demo_bundle, step_costs="free") as found:
        yield found


@pytest.fixture
def visit(browser: Any, service: RunningService) -> Iterator[Visit]:
    found = Visit(browser, root_of(service))
    yield found
    found.context.close()
    assert found.complaints == []
    assert {re.sub(r"^(https?://[^/]*).*", r"\1", url) for url in found.requested} == {root_of(service)}


def expected(runtime: Runtime, **options: Any) -> str:
    messages = [{"role": "user", "content": QUESTION}]
    return runtime.generate(messages, Decoding(max_tokens=TOKENS, fork=False, **options)).text


def saved_trace(visit: Visit) -> Any:
    with visit.page.expect_download() as download:
        visit.page.click("text=Save trace")
    return trace_of(json.loads(Path(download.value.path()).read_text("utf-8")))


def titles(record: Any) -> list[str]:
    """What the bar of each step says."""
    found = []
    for number, step in enumerate(record.steps, 1):
        kinds = Counter(kind for rows in step.rows for kind in rows.kinds)
        tokens = sum(rows.generated for rows in step.rows)
        counts = f"{tokens} token{'s' * (tokens != 1)}, {kinds.total()} row{'s' * (kinds.total() != 1)}"
        kinds_text = f"{kinds['known']} known, {kinds['candidate']} candidates, {kinds['mask']} masks"
        reasons = [f"\ndraft limited: {REASONS[rows.limited]}" for rows in step.rows if rows.limited]
        found.append(f"step {number}: {counts} ({kinds_text}){''.join(dict.fromkeys(reasons))}")
    return found


def test_an_answer_is_that_of_the_runtime_with_its_counts(visit: Visit, runtime: Runtime) -> None:
    visit.ask(QUESTION)
    visit.finish()
    answer = expected(runtime)
    assert visit.page.locator(".answered .generated").evaluate("element => element.textContent") == answer
    record = saved_trace(visit)
    statistics = statistics_of(record)
    drafted, accepted = sum(statistics.drafted_by_depth), sum(statistics.accepted_by_depth)
    assert accepted > 0
    assert visit.page.locator(".answered b").count() == accepted
    assert visit.page.locator(".answered i").count() == statistics.tokens - accepted
    steps = statistics.steps + statistics.prompt_steps
    assert visit.texts(".watch .numbers dd")[1:] == [
        f"{statistics.tokens_per_step:.2f}",
        f"{accepted} of {drafted}",
        f"{statistics.rows / steps:.1f}",
    ]
    assert visit.page.locator(".strip .column").count() == steps
    assert visit.page.locator(".strip .token").count() == statistics.tokens
    assert visit.page.locator(".strip title").all_text_contents() == titles(record)
    assert (
        visit.texts(".depth .share")
        == [
            f"{round(100 * right / all_)}% of {all_}"
            for all_, right in zip(statistics.drafted_by_depth, statistics.accepted_by_depth, strict=True)
        ][:8]
    )


def test_text_and_steps_grow_while_an_answer_is_generated(visit: Visit, runtime: Runtime) -> None:
    visit.ask(QUESTION, "slow", **{"max-tokens": "30", "drafts": False})
    shown, strip = visit.page.locator(".answered .generated"), visit.page.locator(".strip .column")
    visit.page.locator(".answered i").nth(4).wait_for()
    early, steps = shown.evaluate("element => element.textContent"), strip.count()
    visit.finish()
    answer = runtime.generate([{"role": "user", "content": QUESTION}], Decoding(max_tokens=30, fork=False)).text
    assert answer.startswith(early)
    assert 0 < len(early) < len(answer)
    assert 0 < steps < strip.count()
    assert shown.evaluate("element => element.textContent") == answer


def test_a_second_question_has_the_first_answer_before_it(visit: Visit, runtime: Runtime) -> None:
    visit.ask(QUESTION)
    visit.finish()
    first = expected(runtime)
    visit.ask("And now?", system="Answer briefly.")
    visit.finish()
    messages = [
        {"role": "system", "content": "Answer briefly."},
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "And now?"},
    ]
    found = runtime.generate(messages, Decoding(max_tokens=TOKENS, fork=False)).text
    assert visit.page.locator(".answered .generated").last.evaluate("element => element.textContent") == found
    assert visit.texts(".asked") == [QUESTION, "And now?"]


def test_a_model_without_a_chat_template_continues_the_text(browser: Any, tiny_bundle: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny_bundle, base)
    (base / TEMPLATE_FILE).unlink()
    edit(base, lambda entries: entries["files"].pop(TEMPLATE_FILE))
    with (
        running_service({"tiny": partial(Runtime.open, base, step_costs="free")}) as service,
        Runtime.open(base, step_costs="free") as runtime,
    ):
        visit = Visit(browser, root_of(service))
        visit.ask("import json\n", "tiny", **{"max-tokens": "20"})
        visit.finish()
        found = runtime.generate("import json", Decoding(max_tokens=20, fork=False)).text
        assert visit.page.locator(".answered .generated").evaluate("element => element.textContent") == visible(found)
        visit.context.close()
        assert visit.complaints == []


def test_a_race_says_that_the_texts_are_identical(visit: Visit) -> None:
    visit.page.check("#race")
    visit.ask(QUESTION)
    visit.finish()
    (result,) = visit.texts(".race .result")
    assert re.fullmatch(r"✓ identical, \d+\.\d\d times as fast with drafts", result)
    bars = visit.page.locator(".race progress")
    assert [bars.nth(index).evaluate("bar => bar.value / bar.max") for index in range(2)] == [1, 1]


@pytest.mark.parametrize(
    ("drafted", "plain", "same"), [("one two three", "one two four", 8), ("one two three", "one two", 7)]
)
def test_a_race_says_where_texts_differ(visit: Visit, drafted: str, plain: str, same: int) -> None:
    """A plain answer from elsewhere, which no bundle would give."""
    answers = iter([drafted, plain])

    def answer(route: Any) -> None:
        text = json.dumps({"choices": [{"delta": {"content": next(answers)}}]})
        end = json.dumps({"choices": [{"delta": {}, "spaceport": {"ending": "end"}}]})
        route.fulfill(content_type="text/event-stream", body=f"data: {text}\n\ndata: {end}\n\ndata: [DONE]\n\n")

    visit.page.route("**/v1/chat/completions", answer)
    visit.page.check("#race")
    visit.page.locator("#model option").first.wait_for(state="attached")
    visit.page.fill("#prompt", QUESTION)
    visit.page.keyboard.press("Enter")
    visit.page.locator(".race .result").wait_for()
    assert visit.texts(".race .result") == [f"✗ different after {same} characters"]
    assert visit.texts(".answered .generated") == [drafted]


def test_an_answer_that_breaks_off_is_reported(visit: Visit) -> None:
    part = json.dumps({"choices": [{"delta": {"content": "one"}}]})
    bodies = iter([f"data: {part}\n\n", 'data: {"error": {"message": "the engine failed"}}\n\ndata: [DONE]\n\n'])
    visit.page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=next(bodies))
    )
    visit.page.locator("#model option").first.wait_for(state="attached")
    for message in ("The connection ended before the answer did.", "the engine failed"):
        visit.page.fill("#prompt", QUESTION)
        visit.page.keyboard.press("Enter")
        visit.page.locator(f".fault:has-text('{message}')").wait_for()
        visit.finish()


def test_a_sampled_race_uses_one_seed(visit: Visit) -> None:
    visit.page.check("#race")
    visit.ask(QUESTION, temperature="1")
    visit.finish()
    assert visit.texts(".race .identical") == ["✓ identical"]


def test_an_answer_can_be_stopped_and_its_slot_is_free(visit: Visit, service: RunningService) -> None:
    visit.ask(QUESTION, "slow", **{"max-tokens": "30", "drafts": False})
    visit.page.locator(".answered i").nth(4).wait_for()
    visit.page.keyboard.press("Escape")
    visit.finish()
    assert "stopped" in visit.texts(".facts")[0]
    service.wait_until_idle()


def test_the_report_of_an_answer_can_be_replayed(visit: Visit) -> None:
    visit.ask(QUESTION)
    visit.finish()
    record = saved_trace(visit)
    visit.page.click(".facts >> text=Report")
    cells = visit.page.locator("#report .cell")
    assert cells.count() == sum(len(step.rows) for step in record.steps)
    slider = visit.page.locator(".player input[type=range]")
    slider.fill("3")
    assert cells.count() == sum(len(step.rows) for step in record.steps[:3])
    visit.page.select_option(".player select", "4")
    visit.page.click(".player >> text=Play")
    visit.page.locator('.player button:has-text("Play")').wait_for()
    assert cells.count() == sum(len(step.rows) for step in record.steps)


def test_a_stored_trace_of_forked_threads_is_opened(visit: Visit, tmp_path: Path) -> None:
    record = traced(Case(44, max_threads=2))[1].record(TOKENIZER)
    write_trace(tmp_path / "trace.json", record)
    visit.page.set_input_files("#file", tmp_path / "trace.json")
    visit.page.locator("#report h2").first.wait_for()
    assert visit.page.locator("#report .name").count() == len(record.threads) > 2
    visit.page.locator(".watch .lanes .name").first.wait_for(state="attached")
    assert visit.page.locator(".watch .lanes .name").count() == len(record.threads)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("nothing", "The file is not JSON: expected a trace"),
        ("{}", "The file is no trace: expected one"),
        ('{"prompt": [], "threads": [], "steps": [], "schema": 9}', "The trace has schema 9: expected 2."),
    ],
)
def test_a_file_that_is_no_trace_is_refused(visit: Visit, tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "trace.json").write_text(content, "utf-8")
    visit.page.set_input_files("#file", tmp_path / "trace.json")
    visit.page.locator("#state:has-text('file'), #state:has-text('schema')").wait_for()
    assert visit.texts("#state")[0].startswith(message)


def test_a_request_that_is_refused_says_why(visit: Visit) -> None:
    visit.ask("x " * 90_000)
    visit.page.locator(".fault").wait_for()
    assert "the prompt has more than 2048 tokens" in visit.texts(".fault")[0]
    visit.complaints[:] = [each for each in visit.complaints if "400" not in each]


def test_the_page_asks_for_a_key(browser: Any, demo_bundle: Path) -> None:
    with running_service({"demo": partial(Runtime.open, demo_bundle)}, ServiceOptions(keys=(KEY,))) as service:
        visit = Visit(browser, root_of(service))
        visit.page.locator("#settings[open]").wait_for()
        assert "no valid key" in visit.texts("#state")[0]
        visit.page.fill("#key", KEY)
        visit.page.click("text=Done")
        visit.page.locator("#model option").first.wait_for(state="attached")
        assert visit.texts("#state") == [""]
        visit.ask(QUESTION)
        visit.finish()
        assert visit.page.locator(".answered i").count() > 0
        assert KEY not in visit.page.content()
        visit.context.close()


def test_the_page_can_be_switched_off(browser: Any, demo_bundle: Path) -> None:
    with running_service({"demo": partial(Runtime.open, demo_bundle)}, ServiceOptions(page=False)) as service:
        visit = Visit(browser, root_of(service))
        assert "no such endpoint" in visit.page.content()
        visit.context.close()


def test_screen_readers_find_every_part(visit: Visit) -> None:
    visit.ask(QUESTION)
    visit.finish()
    tree = visit.page.locator("body").aria_snapshot()
    for part in (
        'heading "Spaceport" [level=1]',
        'combobox "Model"',
        'checkbox "Race against plain decoding"',
        'button "Open a trace"',
        'region "Chat"',
        'textbox "Message"',
        'button "Send"',
        'complementary "How the answer was decoded"',
        'heading "Acceptance by depth" [level=2]',
        'meter "Acceptance at depth 1"',
        'img "Tokens generated and rows computed in each step"',
        'button "Report"',
    ):
        assert part in tree, part


def test_the_page_can_be_used_with_the_keyboard_alone(visit: Visit) -> None:
    visit.page.locator("#model option").first.wait_for(state="attached")
    reached: list[str] = []
    for _ in range(6):
        visit.page.keyboard.press("Tab")
        reached.append(visit.page.evaluate("() => document.activeElement.id"))
    assert reached == ["model", "race", "open", "options", "prompt", "send"]
    visit.page.focus("#prompt")
    visit.page.keyboard.type("import")
    visit.page.keyboard.press("Shift+Enter")
    visit.page.keyboard.type("json")
    visit.page.keyboard.press("Enter")
    visit.page.locator(".answered i").first.wait_for()
    visit.finish()
    assert visit.texts(".asked") == ["import\njson"]


def test_the_field_for_messages_stays_in_view(visit: Visit) -> None:
    visit.page.set_viewport_size({"width": 1280, "height": 400})
    for _ in range(3):
        visit.ask(QUESTION, **{"max-tokens": "400"})
        visit.finish()
    turns = visit.page.locator(".turns")
    assert turns.evaluate("element => element.scrollHeight > element.clientHeight")
    box = visit.page.locator("#ask").bounding_box()
    assert box["y"] + box["height"] <= 400


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_a_narrow_screen(browser: Any, service: RunningService, scheme: Any) -> None:
    visit = Visit(browser, root_of(service), viewport={"width": 360, "height": 740}, color_scheme=scheme)
    visit.ask(QUESTION)
    visit.finish()
    assert visit.page.evaluate("() => document.documentElement.scrollWidth") == 360
    paper = visit.page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(255, 255, 255)") == (scheme == "light")
    visit.context.close()
    assert visit.complaints == []
