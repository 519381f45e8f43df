"""Page of a service in a real Chromium: what it shows is what the model did, and it loads nothing from elsewhere."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from spaceport.graphs.contract.manifest import TOKENIZER_FILE
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime
from spaceport.runtime.trace.reader import trace_of
from spaceport.tools.report.numbers import statistics_of
from spaceport.tools.report.words import visible
from spaceport.tools.serve.application import application
from spaceport.tools.serve.options import ServiceOptions
from support.browser import open_browser
from support.chat_runtime import chat_runtime
from support.paths import DEMO
from support.running_service import RunningService, running_service

QUESTION = "Explain the parameters of triangular( low = 0.0, high = 1.0, mode = None )"
TOKENS = 60


def root_of(service: RunningService) -> str:
    return service.url.removesuffix("/v1")


class Visit:
    """A page of the service in a browser, with everything that it complained about and loaded."""

    def __init__(self, browser: Any, url: str) -> None:
        self.context = browser.new_context(viewport={"width": 1280, "height": 900})
        self.page = self.context.new_page()
        self.page.set_default_timeout(15_000)
        self.complaints: list[str] = []
        self.requested: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requested.append(request.url))
        self.page.goto(url)

    def ask(self, text: str, model: str = "demo", ends: bool = True, **settings: str) -> None:
        """Set what is given in the settings, and ask; wait for the end of the answer."""
        self.page.select_option("#model", model)
        self.page.click("#options")
        for name, value in {"max-tokens": str(TOKENS), **settings}.items():
            self.page.fill(f"#{name}", value)
        self.page.click("text=Done")
        self.send(text)
        if ends:
            self.finish()

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


def expected(runtime: Runtime, *messages: str, system: str | None = None) -> str:
    """The answer to the last of these messages, of which every second one is an answer."""
    turns = [{"role": "system", "content": system}] if system else []
    turns += [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(messages)]
    return visible(runtime.generate(turns, Decoding(max_tokens=TOKENS, fork=False)).text)


def saved_trace(visit: Visit) -> Any:
    with visit.page.expect_download() as download:
        visit.page.click("text=Save trace")
    return trace_of(json.loads(Path(download.value.path()).read_text("utf-8")))


@pytest.mark.slow
def test_an_answer_is_that_of_the_runtime_with_its_counts(visit: Visit, runtime: Runtime) -> None:
    visit.ask(QUESTION)
    assert visit.shown == expected(runtime, QUESTION)
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
    visit.page.click(".facts >> text=Report")
    cells = visit.page.locator("#report .cell")
    assert cells.count() == sum(len(step.rows) for step in record.steps)
    visit.page.locator(".player input[type=range]").fill("3")
    assert cells.count() == sum(len(step.rows) for step in record.steps[:3])


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


@pytest.mark.nightly
def test_text_and_steps_grow_until_the_answer_ends_or_is_stopped(
    visit: Visit, runtime: Runtime, service: RunningService
) -> None:
    visit.ask(QUESTION, "slow", ends=False)
    strip = visit.page.locator(".strip .column")
    visit.page.locator(".answered i").first.wait_for()
    early, steps = visit.shown, strip.count()
    visit.finish()
    answer = expected(runtime, QUESTION)
    assert answer.startswith(early)
    assert 0 < len(early) < len(answer)
    assert 0 < steps < strip.count()
    assert visit.shown == answer
    visit.ask(QUESTION, "slow", ends=False)
    visit.page.locator(".answered").last.locator("i").first.wait_for()
    visit.page.keyboard.press("Escape")
    visit.finish()
    assert "stopped" in visit.texts(".facts")[-1]
    service.wait_until_idle()


@pytest.mark.nightly
def test_a_second_question_has_the_first_answer_before_it_unless_there_is_no_chat_template(
    visit: Visit, runtime: Runtime
) -> None:
    visit.ask(QUESTION)
    first = visit.shown
    visit.ask("And now?", system="Answer briefly.")
    assert visit.shown == expected(runtime, QUESTION, first, "And now?", system="Answer briefly.")
    visit.page.reload()
    visit.page.locator("#model option").first.wait_for(state="attached")
    visit.ask("import json\n", "base")
    assert visit.shown == visible(runtime.generate("import json", Decoding(max_tokens=TOKENS, fork=False)).text)


@pytest.mark.nightly
def test_races_say_whether_texts_are_identical_and_broken_answers_say_so(visit: Visit) -> None:
    visit.page.check("#race")
    visit.ask(QUESTION, temperature="1")
    assert re.match(r"✓ identical, \d+\.\d\d times as (fast|slow)", visit.texts(".race .result")[0])
    end = 'data: {"choices": [{"delta": {}, "spaceport": {"ending": "end"}}]}\n\ndata: [DONE]\n\n'
    parts = [f'data: {{"choices": [{{"delta": {{"content": "one two {last}"}}}}]}}\n\n' for last in ("three", "four")]
    failure = 'data: {"error": {"message": "the engine failed"}}\n\ndata: [DONE]\n\n'
    answers = iter([parts[0] + end, parts[1] + end, parts[0], failure])  # no runtime would give them
    visit.page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=next(answers))
    )
    visit.send(QUESTION)
    visit.page.locator(".race .result").nth(1).wait_for()
    assert visit.texts(".race .result")[1] == "✗ different after 8 characters"
    visit.page.uncheck("#race")
    for message in ("The connection ended before the answer did.", "the engine failed"):
        visit.send(QUESTION)
        visit.page.locator(f".fault:has-text('{message}')").wait_for()
        visit.finish()
