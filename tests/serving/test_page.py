"""Page of a service in a real Chromium: what it shows is what the model did, and it loads nothing from elsewhere."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import msgspec
import pytest
from starlette.testclient import TestClient

from spaceport.graphs.contract.manifest import TOKENIZER_FILE, TokenIds
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime
from spaceport.runtime.trace import StepRecord, ThreadRecord, ThreadRows, TraceRecord
from spaceport.serving.application import application
from spaceport.serving.options import ServiceOptions
from spaceport.tools.report.files import visible, write_trace
from support.browser import open_browser
from support.chat_runtime import RunningService, chat_runtime, running_service
from support.paths import DEMO
from support.traced import TOKENIZER, Case, traced

QUESTION = "Explain the parameters of triangular( low = 0.0, high = 1.0, mode = None )"
TOKENS = 60
KEY = "sk-page"


def root_of(service: RunningService) -> str:
    return service.url.removesuffix("/v1")


class Visit:
    """A page of the service in a browser, with everything that it complained about and loaded."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        self.page = self.context.new_page()
        self.page.set_default_timeout(60_000)
        self.complaints: list[str] = []
        self.requested: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requested.append(request.url))
        self.url = url
        self.page.goto(url)

    def ask(self, text: str, model: str = "demo", ends: bool = True, **settings: str | bool) -> None:
        """Set what is given in the settings, and ask; wait for the end of the answer."""
        self.page.select_option("#model", model)
        self.page.click("#options")
        for name, value in {"max-tokens": str(TOKENS), **settings}.items():
            if isinstance(value, bool):
                self.page.set_checked(f"#{name}", value)
            else:
                self.page.fill(f"#{name}", value)
        self.page.click("text=Done")
        self.send(text)
        if ends:
            self.finish()

    def wait_for_models(self) -> None:
        self.page.locator("#model option").first.wait_for(state="attached")

    def answer_with(self, bodies: Iterable[str]) -> None:
        """Answer the next requests with these events, which are from elsewhere."""
        body = iter(bodies)
        self.page.route(
            "**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=next(body))
        )
        self.wait_for_models()

    def send(self, text: str) -> None:
        turns = self.page.locator("#turns > li")
        before = turns.count()
        self.page.fill("#prompt", text)
        self.page.keyboard.press("Enter")
        turns.nth(before).wait_for()  # "Stop" may be gone again: short answers take milliseconds

    def finish(self) -> None:
        """Wait until nothing runs."""
        self.page.locator('#send:has-text("Send")').wait_for()

    @property
    def shown(self) -> str:
        """The text of the last answer."""
        return str(self.page.locator(".answered .generated").last.evaluate("element => element.textContent"))

    def texts(self, selector: str) -> list[str]:
        return list(self.page.locator(selector).all_inner_texts())


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as found:
        yield found


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    base = tmp_path_factory.mktemp("base")  # without a chat template
    shutil.copy(DEMO / TOKENIZER_FILE, base)
    slow = partial(chat_runtime, delay=0.1)  # steps take long enough to be watched
    with running_service({"demo": chat_runtime, "slow": slow, "base": partial(chat_runtime, base)}) as found:
        yield found


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with chat_runtime() as found:
        yield found


@pytest.fixture
def visit(browser: Any, service: RunningService) -> Iterator[Visit]:
    found = Visit(browser, root_of(service))
    yield found
    found.context.close()
    assert found.complaints == []
    assert {re.sub(r"^(https?://[^/]*).*", r"\1", url) for url in found.requested} == {root_of(service)}


def expected(runtime: Runtime, *messages: str, system: str | None = None, max_tokens: int = TOKENS) -> str:
    """The answer to the last of these messages, of which every second one is an answer."""
    turns = [{"role": "system", "content": system}] if system else []
    turns += [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(messages)]
    return runtime.generate(turns, Decoding(max_tokens=max_tokens, fork=False)).text


def saved_trace(visit: Visit) -> Any:
    with visit.page.expect_download() as download:
        visit.page.click("text=Save trace")
    return msgspec.convert(json.loads(Path(download.value.path()).read_text("utf-8")), TraceRecord, str_keys=True)


@pytest.mark.slow
def test_an_answer_is_that_of_the_runtime_with_its_counts(visit: Visit, runtime: Runtime) -> None:
    visit.ask(QUESTION)
    assert visit.shown == expected(runtime, QUESTION)
    assert visit.page.locator(".turns .legend .chip").first.is_visible()  # what the colours mean
    record = saved_trace(visit)
    fed = [rows for step in record.steps for rows in step.rows]
    accepted, tokens = sum(rows.accepted for rows in fed), sum(rows.generated for rows in fed)
    assert accepted > 0
    drawn = [index < rows.accepted for rows in fed for index, piece in enumerate(rows.pieces) if piece]
    assert visit.page.locator(".answered b:not(.rest)").count() == sum(drawn)
    assert visit.page.locator(".answered i:not(.rest)").count() == len(drawn) - sum(drawn)
    steps, drafting = len(record.steps), sum(any(rows.chosen for rows in step.rows) for step in record.steps)
    assert visit.texts(".watch .numbers dd")[1:] == [
        f"{tokens / drafting:.2f}",
        f"{accepted} of {sum(len(rows.candidates) for rows in fed)}",
        f"{sum(len(rows.tokens) for rows in fed) / steps:.1f}",
    ]
    assert visit.page.locator(".strip .column").count() == steps
    assert visit.page.locator(".strip .token").count() == tokens
    drafted = Counter(rows.positions[row] - rows.position for rows in fed for row in rows.candidates)
    right = Counter(depth for rows in fed for depth in range(rows.accepted))
    shares = [f"{round(100 * right[depth] / drafted[depth])}% of {drafted[depth]}" for depth in sorted(drafted)]
    assert visit.texts(".depth .share") == shares[:8]


@pytest.mark.slow
def test_the_files_of_the_page_may_load_only_each_other_and_are_cached() -> None:
    with TestClient(application({}, answers_while_opening=True)) as client:
        for path in ("/", "/page/main.js", "/page/page.css"):
            response = client.get(path)
            assert response.headers["content-security-policy"].startswith("default-src 'self';")
            given = {"if-none-match": response.headers["etag"]}
            assert (response.status_code, client.get(path, headers=given).status_code) == (200, 304)
            assert client.get(path, headers={"if-none-match": '"other"'}).content == response.content != b""
        assert client.get("/page/index.html").status_code == 404
    with TestClient(application({}, ServiceOptions(page=False), answers_while_opening=True)) as client:
        assert "no such endpoint" in client.get("/").text


@pytest.mark.slow
def test_the_page_offers_what_the_chosen_model_can_do(browser: Any) -> None:
    opened = Event()

    def plain() -> Runtime:
        assert opened.wait(60)
        return chat_runtime(drafts=False)

    with running_service({"tiny-coder": plain, "demo": chat_runtime}, answers_while_opening=True) as service:
        visit = Visit(browser, root_of(service))
        page = visit.page
        page.locator("#state:has-text('being opened')").wait_for()
        opened.set()
        page.locator("#origins li").first.wait_for()
        shown = {}
        for model in ("tiny-coder", "demo"):
            page.select_option("#model", model)
            words = " ".join(visit.texts("#welcome > p") + visit.texts("#origins li") + visit.texts("#examples button"))
            fields = [page.locator(name) for name in ("#mask-slots", "#fork")]
            notes = [field.locator("xpath=..//small").text_content() for field in fields]
            shown[model] = (words, [field.is_enabled() for field in fields], notes)
        words, enabled, notes = shown["tiny-coder"]
        assert ("mask" in words, "drafts for itself" in words, "class Stack" in words) == (False, False, True)
        reasons = ["this model has neither mask slots nor heads", "this model has no fork token"]
        assert (enabled, notes) == ([False, False], reasons)
        words, enabled, notes = shown["demo"]
        assert ("mask" in words, "drafts for itself" in words, "class Stack" in words) == (True, True, False)
        assert (enabled, notes) == ([True, True], ["0 to 5", ""])
        visit.context.close()


@pytest.mark.nightly
def test_text_and_steps_grow_until_the_answer_ends(visit: Visit, runtime: Runtime) -> None:
    visit.ask(QUESTION, "slow", ends=False, **{"max-tokens": "30", "drafts": False})
    strip = visit.page.locator(".strip .column")
    visit.page.locator(".answered i").nth(4).wait_for()
    early, steps = visit.shown, strip.count()
    visit.finish()
    answer = expected(runtime, QUESTION, max_tokens=30)
    assert answer.startswith(early)
    assert 0 < len(early) < len(answer)
    assert 0 < steps < strip.count()
    assert visit.shown == answer


@pytest.mark.nightly
def test_a_model_without_a_chat_template_continues_the_text(visit: Visit, runtime: Runtime) -> None:
    visit.wait_for_models()
    visit.ask("import json\n", "base")
    assert visit.shown == visible(runtime.generate("import json", Decoding(max_tokens=TOKENS, fork=False)).text)


@pytest.mark.slow
def test_a_stopped_answer_stays_in_the_conversation_until_a_new_chat(
    visit: Visit, runtime: Runtime, service: RunningService
) -> None:
    visit.ask(QUESTION, "slow", ends=False, drafts=False)
    visit.page.locator(".answered i").nth(4).wait_for()
    visit.page.keyboard.press("Escape")
    visit.finish()
    assert "stopped" in visit.texts(".facts")[-1]
    service.wait_until_idle()
    drawn = visit.shown
    visit.page.reload()
    visit.wait_for_models()
    kept = str(visit.page.evaluate("JSON.parse(sessionStorage.getItem('spaceport.conversation'))[1].content"))
    assert kept
    assert expected(runtime, QUESTION).startswith(kept)
    assert visit.shown == visible(kept)
    assert drawn.startswith(visible(kept).partition("⟨")[0])
    assert visit.texts(".asked") == [QUESTION]
    visit.ask("And now?", system="Answer briefly.")
    assert visit.shown == visible(expected(runtime, QUESTION, kept, "And now?", system="Answer briefly."))
    visit.page.click("text=New chat")
    assert visit.texts(".asked") == []
    assert visit.page.locator("#examples button").first.is_visible()
    visit.ask("And now?", system="", **{"max-tokens": "3"})
    assert visit.shown == expected(runtime, "And now?", max_tokens=3)
    assert "cut off" in visit.texts(".facts")[-1]
    visit.ask(QUESTION, "slow", ends=False, drafts=False)
    visit.page.locator(".answered").last.locator("i").nth(4).wait_for()
    visit.page.reload()  # while the answer grows
    assert visit.texts(".asked") == ["And now?", QUESTION]
    assert visit.shown


@pytest.mark.slow
def test_a_message_that_is_refused_comes_back_to_its_field(visit: Visit) -> None:
    text = "x" + " x" * 120_000
    visit.wait_for_models()
    visit.send(text)
    visit.page.locator(".fault:has-text('the prompt has')").wait_for()
    assert visit.page.input_value("#prompt") == text
    visit.complaints[:] = [each for each in visit.complaints if "400" not in each]


@pytest.mark.nightly
@pytest.mark.parametrize("temperature", ["0", "1"])
def test_a_race_says_that_the_texts_are_identical(visit: Visit, temperature: str) -> None:
    visit.page.check("#race")
    visit.ask(QUESTION, temperature=temperature)
    (result,) = visit.texts(".race .result")
    found = re.match(r"✓ identical, (\d+\.\d\d) times as fast", result)
    assert found
    bars = visit.page.locator(".race progress")
    drafted, plain = (bars.nth(index).evaluate("bar => bar.value / bar.max") for index in range(2))
    assert max(drafted, plain) == 1
    assert plain / drafted == pytest.approx(float(found[1]), abs=0.0051)  # lengths are times


@pytest.mark.slow
def test_a_reload_keeps_the_settings_but_no_key(visit: Visit) -> None:
    texts = {"system": "Answer\nbriefly.", "max-tokens": "7", "temperature": "0.5", "seed": "3", "mask-slots": "2"}
    visit.page.click("#options")
    for name, value in {**texts, "key": KEY}.items():
        visit.page.fill(f"#{name}", value)
    visit.page.set_checked("#drafts", False)
    visit.page.click("text=Done")
    visit.page.goto("about:blank")  # without the fields that a browser itself fills again
    visit.page.goto(visit.url)
    visit.wait_for_models()
    assert {name: visit.page.input_value(f"#{name}") for name in [*texts, "key"]} == {**texts, "key": ""}
    assert [visit.page.is_checked(f"#{name}") for name in ("drafts", "fork")] == [False, False]
    assert KEY not in str(visit.page.evaluate("sessionStorage.getItem('spaceport.settings')"))


def data(**choice: Any) -> str:
    return f"data: {json.dumps({'choices': [choice]})}\n\n"


@pytest.mark.nightly
def test_answers_that_differ_break_off_or_are_refused_say_so(visit: Visit) -> None:
    """Some answers are from elsewhere, since no runtime would give them."""
    end = data(delta={}, spaceport={"ending": "end"}) + "data: [DONE]\n\n"
    texts = ("one two three", "one two four", "one two three", "one two")
    failure = 'data: {"error": {"message": "the engine failed"}}\n\ndata: [DONE]\n\n'
    broken = data(delta={"content": "one"})
    visit.answer_with([*(data(delta={"content": text}) + end for text in texts), broken, failure])
    visit.page.check("#race")
    for number, same in enumerate((8, 7)):
        visit.send(QUESTION)
        visit.page.locator(".race .result").nth(number).wait_for()
        assert visit.texts(".race .result")[number] == f"✗ different after {same} characters"
        assert visit.shown == "one two three"
    visit.page.uncheck("#race")
    for message in ("The connection ended before the answer did.", "the engine failed", "the prompt has more than"):
        if message.startswith("the prompt"):
            visit.page.unroute_all()
        visit.send("x " * 90_000 if message.startswith("the prompt") else QUESTION)
        visit.page.locator(f".fault:has-text('{message}')").wait_for()
        visit.finish()
    visit.complaints[:] = [each for each in visit.complaints if "400" not in each]


def step(*threads: list[str]) -> StepRecord:
    """A step of a trace in which threads generate tokens with these texts."""
    row: Any = {"anchor": None, "tokens": (5,), "parents": (None,), "positions": (0,), "kinds": ("known",)}
    row |= {"sources": (None,), "retained": (True,)}
    rows = [
        ThreadRows(thread, **row, chosen=(5,) * len(pieces), generated=len(pieces), pieces=tuple(pieces))
        for thread, pieces in enumerate(threads)
    ]
    return StepRecord(tuple(rows), (), (), (), 1, 0.0, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("forked", [False, True])
def test_control_characters_are_drawn_the_same_while_a_text_grows_at_its_end_and_after_a_reload(
    visit: Visit, forked: bool
) -> None:
    pieces = [["a\r", "", "\x07b\r\n", "c"], *([["x\r", "y"]] if forked else [])]  # the second token forks
    text = "a\rx\ry\x07b\r\nc" if forked else "a\r\x07b\r\nc"
    threads = tuple(ThreadRecord((0,) * number, 2 if number else None, 1, "stop") for number in range(len(pieces)))
    steps = (step(*pieces), step(["behind the stop string"]))
    trace = TraceRecord(TokenIds(fork=9, child=10), (1,), "", threads, steps).as_dict()
    growth = {
        "steps": trace["steps"][:1],
        "threads": [{**one, "ending": None} for one in trace["threads"]],
        "texts": {},
    }
    grown = data(delta={"content": text}, spaceport=growth)
    end = data(delta={}, spaceport={"ending": "stop", "trace": trace}) + "data: [DONE]\n\n"
    visit.answer_with([grown, grown + end])  # one breaks off
    for number in range(2):
        visit.send("How?")
        visit.finish()
        tokens = visit.page.locator(".answered .generated").nth(number).locator("b, i")
        tokens.first.wait_for(state="attached")
        assert "".join(tokens.all_text_contents()) == visible(text)
    visit.page.reload()
    assert visit.shown == visible(text)


@pytest.mark.slow
def test_answers_and_code_in_questions_are_drawn_as_markdown(visit: Visit) -> None:
    answer = "**Try** this:\n```python\nprint(1)\n```\n<b>done</b>"
    body = "".join(data(delta={"content": answer[at : at + 4]}) for at in range(0, len(answer), 4))
    body += data(delta={}, spaceport={"ending": "end"}) + "data: [DONE]\n\n"
    question = "Why *not*?\n```c\nint *a, *b;\n```"
    visit.answer_with([body] * 2)
    for text in ("a *b* <i>c</i>", question):
        visit.send(text)
        visit.finish()
    assert visit.texts(".asked")[0] == "a *b* <i>c</i>"
    assert visit.texts(".asked pre code") == ["int *a, *b;\n"]
    assert visit.shown == answer
    assert visit.texts(".answered strong") == ["Try"] * 2
    assert visit.texts(".answered pre code") == ["print(1)\n"] * 2
    assert visit.page.locator(".answered b").count() == 0  # what the answer says is text


@pytest.mark.nightly
def test_screen_readers_find_the_chat_and_the_report_can_be_replayed(visit: Visit) -> None:
    visit.ask(QUESTION)
    tree = visit.page.locator("body").aria_snapshot()
    for part in ('combobox "Model"', 'textbox "Message"', 'button "Send"', 'meter "Acceptance at depth 1"'):
        assert part in tree
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


@pytest.mark.nightly
def test_a_stored_trace_of_forked_threads_is_opened_and_other_files_are_refused(visit: Visit, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    record = traced(Case(44, max_threads=2))[1].record(TOKENIZER)
    write_trace(file, record)
    visit.page.set_input_files("#file", file)
    visit.page.locator("#report h2").first.wait_for()
    assert visit.page.locator("#report .name").count() == len(record.threads) > 2
    visit.page.locator(".watch .lanes .name").first.wait_for(state="attached")
    assert visit.page.locator(".watch .lanes .name").count() == len(record.threads)
    for content, message in (
        ("nothing", "The file is not JSON: expected a trace"),
        ("{}", "The file is no trace: expected one"),
        ('{"prompt": [], "threads": [], "steps": [], "schema": 9}', "The trace has schema 9: expected 3."),
    ):
        file.write_text(content, "utf-8")
        visit.page.set_input_files("#file", file)
        visit.page.locator(f"#report .fault:has-text('trace.json: {message}')").wait_for()
        assert visit.page.locator("#report h2").count() == 0


@pytest.mark.nightly
def test_the_page_asks_for_a_key(browser: Any) -> None:
    with running_service({"demo": chat_runtime}, ServiceOptions(keys=(KEY,))) as service:
        visit = Visit(browser, root_of(service))
        visit.page.locator("#settings[open]").wait_for()
        assert "no valid key" in visit.texts("#state")[0]
        visit.page.fill("#key", KEY)
        visit.page.click("text=Done")
        visit.wait_for_models()
        assert visit.texts("#state") == [""]
        visit.ask(QUESTION)
        assert visit.page.locator(".answered i").count() > 0
        assert KEY not in visit.page.content()
        visit.context.close()
