"""Plot: a bar for each measured value, and a line for each runtime with steps of several rows."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from spaceport.tools.bench.compare.machine import Machine
from spaceport.tools.bench.compare.metrics import metrics_of
from spaceport.tools.bench.compare.plot import plot_of
from spaceport.tools.bench.compare.summary import Comparison, summarized
from spaceport.tools.bench.compare.worker_pool import Measurement, Record
from support.fake_subjects import WORKLOAD, fake_subject

SVG = "{http://www.w3.org/2000/svg}"


def comparison(folder: Path, *names: str) -> Comparison:
    records = {}
    for index, name in enumerate(names):
        record = Record(
            fake_subject(name, folder, is_bundle=not index),
            {"versions": {}, "import_seconds": 0, "open_seconds": 0},
            5_000_000,
            5_000_000,
        )
        record.measurements = {"decode": {0: Measurement(10.0 + index, 1, 0)}, "1 row": {0: Measurement(10, 1, 0)}}
        if not index:
            record.measurements["4 rows"] = {0: Measurement(20, 1, 0)}
        records[name] = record
    metrics = metrics_of(WORKLOAD)
    machine = Machine("A & B", "model 1", 2, (), "Linux")
    return Comparison("c<1>", machine, 1, 1, WORKLOAD, metrics, summarized(records, metrics), (), 0)


def test_the_picture_is_well_formed_and_has_a_bar_for_each_value(tmp_path: Path) -> None:
    root = ElementTree.fromstring(plot_of(comparison(tmp_path, "ours", "other")))
    assert root.tag == f"{SVG}svg"
    texts = [element.text or "" for element in root.iter(f"{SVG}text")]
    assert "c<1>, 1 thread(s), A & B" in texts
    assert "decode, ms (lower is better)" in texts
    assert "prefill, tokens/s (higher is better)" in texts
    assert texts.count("ours") == 3  # decode, memory, and the lines' legend
    bars = [r for r in root.iter(f"{SVG}rect") if r.get("height") == "14"]
    assert len(bars) == 4
    widths = [float(bar.attrib["width"]) for bar in bars]
    assert widths[0] < widths[1]
    assert widths[2] == widths[3]
    lines = [p for p in root.iter(f"{SVG}path") if p.get("stroke-width") == "2"]
    assert [line.attrib["d"].count("L") for line in lines] == [1, 0]


def test_all_text_is_inside_the_picture(tmp_path: Path) -> None:
    root = ElementTree.fromstring(plot_of(comparison(tmp_path, "ours")))
    height, width = float(root.attrib["height"]), float(root.attrib["width"])
    for element in root.iter(f"{SVG}text"):
        assert 0 <= float(element.attrib["y"]) <= height
        assert 0 <= float(element.attrib["x"]) <= width
