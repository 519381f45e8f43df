"""Report: a self-contained page that shows all of a trace, whatever the tokens are."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.decode.draft import DraftConfig
from spaceport.runtime.trace import ThreadRows, Trace, TraceRecord
from spaceport.tools.report.files import check_target, page_of, visible, write_report, write_trace
from support.browser import Sheet, open_browser
from support.hash_engine import FORK
from support.traced import CASES, TOKENIZER, Case, traced

FORKED = Case(44, max_threads=2)


ODD = (
    *("<b>&amp;", "</script>", "]]>", "\x00", "\x1b[31m", "\u202eabc", "\ud800", "\ufffe", "\n"),
    *("\t", "\ufffd", "'\"", "\x85", "é", ""),
)


@pytest.fixture(scope="module")
def sheet() -> Iterator[Sheet]:
    with open_browser() as browser:
        found = Sheet(browser)
        yield found
        assert found.errors == []


def classes(element: Element) -> list[str]:
    return element.get("class", "").split()


def having(root: Element, kind: str) -> list[Element]:
    """The elements of a class, in the order of the page."""
    return [element for element in root.iter() if kind in classes(element)]


def lanes_drawing(root: Element) -> Element:
    (drawing,) = [svg for svg in root.iter("svg") if svg.get("aria-label") == "The tokens of each thread in each step"]
    return drawing


def texts_of(element: Element) -> str:
    return "".join(element.itertext())


@pytest.mark.slow
@settings(max_examples=30)
@given(case=CASES)
def test_plain_decoding_uses_the_slots_of_one_thread(sheet: Sheet, case: Case) -> None:
    plain = replace(case, draft_config=DraftConfig(0), max_depth=0, total=10**6)
    record = traced(plain)[1].record()
    assert sheet.call("trace.slotsInOneThread", record.as_dict()) == [step.kv_slots for step in record.steps]


@settings(max_examples=40)
@given(case=CASES)
def test_a_page_marks_every_token_once_and_has_a_lane_for_each_thread_in_reading_order(
    sheet: Sheet, case: Case
) -> None:
    request, trace, reading = traced(case)
    record, statistics = trace.record(TOKENIZER), request.statistics
    root = sheet.report(record)
    drawing, (text,) = lanes_drawing(root), having(root, "generated")
    cells = having(drawing, "cell")
    accepted = sum(statistics.accepted_by_depth)
    assert len(having(drawing, "accepted")) == accepted
    assert len(having(drawing, "own")) == statistics.tokens - accepted
    assert len(having(drawing, "end")) == statistics.threads
    assert len(cells) == sum(len(step.rows) for step in record.steps)
    kept = sum(rows.retained[row] for step in record.steps for rows in step.rows for row in rows.candidates)
    assert sum(int(count.text or "") for count in having(drawing, "count")) == sum(statistics.drafted_by_depth) - kept
    assert len(having(drawing, "forks")) == sum(text.count(FORK) for text in record.generated)
    assert (len(list(text.iter("b"))), len(list(text.iter("i")))) == (accepted, statistics.tokens - accepted)
    shown = "".join(texts_of(mark) for mark in text.iter() if mark.tag in "bi")
    assert shown == visible(reading.text)
    found = Counter(mark.get("class") for mark in text.iter() if mark.tag in "bi")
    assert found == Counter(kind for step in record.steps for rows in step.rows for kind in kinds_of(rows))
    paths = sorted(line.path for line in record.threads)
    names = [f"thread {'.'.join(map(str, path))}" if path else "root" for path in paths]
    assert [name.text for name in having(root, "name")] == names
    assert len(having(drawing, "way")) == len(names)
    assert len(having(drawing, "fork")) == len(names) - 1
    ids = Counter(element.get("id") for element in root.iter() if element.get("id"))
    links = [element.get("href", "") for element in root.iter("a")]
    assert set(ids.values()) == {1}
    assert {link[0] for link in links} == {"#"}
    assert {link[1:] for link in links} <= set(ids)  # every link has its target


def kinds_of(rows: ThreadRows) -> Iterator[str]:
    """The CSS class of each generated token: what proposed it, and for mask slots at which depth."""
    accepted = [rows.sources[row] for row in rows.candidates if rows.retained[row]][: rows.accepted]
    for depth, source in enumerate(accepted, 1):
        yield f"mask m{min(depth, 4)}" if source == "mask" else str(source)
    yield from ["own"] * (rows.generated - rows.accepted)


def odd(record: TraceRecord) -> TraceRecord:
    """The same generation with tokens that are hard to show."""
    texts = dict(enumerate(ODD))
    steps = tuple(
        replace(
            step, rows=tuple(replace(rows, pieces=tuple(texts[token] for token in rows.text)) for rows in step.rows)
        )
        for step in record.steps
    )
    return replace(record, texts=texts, prompt_text="".join(ODD), steps=steps)


def test_a_page_can_show_any_text(sheet: Sheet) -> None:
    record = odd(traced(FORKED)[1].record())
    page = page_of(record, "".join(ODD))
    page.encode()
    assert not set(page) & set("\x00\x1b\x85\u202e\ufffe")
    assert len(re.findall("</script", page)) == 3
    root = sheet.report(record)
    assert [element.tag for element in root.iter() if element.tag == "script"] == []
    (text,) = having(root, "generated")
    tokens = [token for step in record.steps for rows in step.rows for token in rows.text]
    assert Counter(texts_of(mark) for mark in text.iter() if mark.tag in "bi") == Counter(
        visible(ODD[t]) for t in tokens
    )
    (prompt,) = having(root, "prompt-text")
    assert texts_of(prompt) == visible("".join(ODD))
    assert "“<b>&amp;”" in "".join(title.text or "" for title in lanes_drawing(root).iter("title"))


@settings(max_examples=50)
@given(text=st.text() | st.text(st.characters(categories=["Cc", "Cf", "Cs", "Cn", "Co", "Zs", "Zl"])))
def test_visible_text_is_valid_in_every_page(sheet: Sheet, text: str) -> None:
    shown = visible(text)
    assert ElementTree.fromstring(f"<a>{shown.replace('&', '&amp;').replace('<', '&lt;')}</a>").text or not text
    shown.encode()
    assert visible(shown) == shown
    assert not set(shown) & set("\u202a\u202b\u202d\u202e\u2066\u2067\u2068\x07\x1b\r")
    assert sheet.call("words.visible", text) == shown


def test_printable_text_is_unchanged() -> None:
    for text in ("", "plain text", "tab\tand\nline", "שלום", "👨‍👩‍👧", "e\u0301", "a\u00a0b"):
        assert visible(text) == text


def test_a_page_loads_no_other_file(sheet: Sheet, tmp_path: Path) -> None:
    record = traced(FORKED)[1].record(TOKENIZER)
    write_report(tmp_path / "report.html", record, "title")
    context = sheet.page.context.browser.new_context(offline=True)
    page, requested = context.new_page(), []
    page.on("request", lambda request: requested.append(request.url.partition(":")[0]))
    page.goto((tmp_path / "report.html").as_uri())
    page.wait_for_selector("#report h2")
    cells = page.evaluate("document.querySelectorAll('#report .cell').length")
    context.close()
    assert set(requested) <= {"file", "data"}
    assert requested.count("file") == 1
    assert cells == sum(len(step.rows) for step in record.steps)


def test_a_page_and_a_trace_are_written_and_replaced(tmp_path: Path) -> None:
    record = traced(FORKED)[1].record(TOKENIZER)
    page, stored = tmp_path / "page.html", tmp_path / "trace.json"
    page.write_text("old")
    stored.write_text("old")
    write_report(page, record, "title")
    write_trace(stored, record)
    assert page.read_text("utf-8") == page_of(record, "title")
    assert json.loads(stored.read_text("utf-8")) == json.loads(json.dumps(record.as_dict()))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["page.html", "trace.json"]
    (tmp_path / "link.html").symlink_to("page.html")
    write_report(tmp_path / "link.html", Trace().record(), "title")
    assert (tmp_path / "link.html").is_symlink()
    assert page.read_text("utf-8") == page_of(Trace().record(), "title")


def test_a_page_needs_a_path_where_a_file_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = Trace().record()
    for path, message in (
        (tmp_path, "is not a file: expected the name of a new file"),
        (tmp_path / "none" / "page.html", f"the folder {tmp_path / 'none'} does not exist: create it first"),
    ):
        for write in (check_target, lambda path: write_report(path, record), lambda path: write_trace(path, record)):
            with pytest.raises(OptionFault, match=re.escape(message)):
                write(path)
    check_target(tmp_path / "page.html")
    monkeypatch.setattr("os.access", lambda path, mode: False)  # the tests may run as root
    with pytest.raises(OptionFault, match="is not writable: choose another folder"):
        check_target(tmp_path / "page.html")
    assert list(tmp_path.iterdir()) == []
