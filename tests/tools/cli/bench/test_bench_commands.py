"""`spaceport bench`: every benchmark is a command, and its results are consistent."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spaceport.runtime.backends import device
from spaceport.runtime.backends.step_costs import cache_folder
from spaceport.tools.bench.gpu import CommandResult
from spaceport.tools.bench.serve.processes import ProcessFailed
from spaceport.tools.bench.serve.subjects import EmbeddedRuntime
from spaceport.tools.bench.start.service_start import measured
from spaceport.tools.cli import run
from spaceport.tools.cli.bench import Benchmarks
from spaceport.tools.cli.bench.gpu import run_command
from spaceport.tools.cli.bench.start import page_caches_of
from spaceport.tools.cli.exit_codes import ACCURACY, INPUT, MISSING, OK, USAGE
from support.paths import DEMO

Capture = pytest.CaptureFixture[str]
pytestmark = [pytest.mark.on_change(), pytest.mark.slow]
HEAVY = ("numpy", "onnxruntime", "torch", "transformers")
PROMPTS = ("import json\n\n\ndef load(path):\n", "def close(self):\n", "class Reader:\n", "for line in lines:\n")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"text": one}) + "\n" for one in PROMPTS), "utf-8")
    return file


def results(capsys: Capture, name: str, *arguments: object) -> dict[str, Any]:
    """The JSON of a benchmark."""
    assert run(["bench", name, *map(str, arguments), "--json"]) == OK
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_help_lists_every_benchmark_and_imports_no_heavy_library(capsys: Capture) -> None:
    program = (
        "import sys; from spaceport.tools.cli import run; code = run(['bench', '--help'])\n"
        f"print([name for name in {HEAVY} if name in sys.modules]); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    *lines, imported = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[lines.index("Commands:") + 1 :]] == list(Benchmarks.summaries)
    assert imported == "[]"
    for name in Benchmarks.summaries:
        assert run(["bench", name, "--help"]) == OK
        assert capsys.readouterr().out.startswith(f"Usage: spaceport bench {name} ")


def test_load_reports_throughput_and_latency_for_each_value_of_max_requests(tiny_bundle: Path, capsys: Capture) -> None:
    options = "--requests 3 --max-requests 1,2 --context 8 --tokens 6 --rounds 1"
    found = results(capsys, "load", tiny_bundle, *options.split())["results"]
    assert [one["max_requests"] for one in found] == [1, 2]
    assert found[0]["ratio"] == 1.0
    for one in found:
        assert 0 < one["first_token_p50"] <= one["latency_p50"] <= one["latency_p95"]
        assert one["tokens_per_second"] > 0


def test_the_next_turn_of_a_chat_reuses_its_history_in_the_prefix_benchmark(demo_bundle: Path, capsys: Capture) -> None:
    options = "--history 40,60 --rounds 1 --threads 1"
    found = results(capsys, "prefix", demo_bundle, *options.split())["results"]
    assert [(one["history"], one["reused"]) for one in found] == [(40, 55), (60, 75)]
    assert all(one["cold_seconds"] > 0 and one["copy_seconds"] > 0 for one in found)


def test_steps_of_bench_outside_have_the_stated_numbers_of_requests_and_rows(
    tiny_bundle: Path, capsys: Capture
) -> None:
    for options in ((), ("--real",)):
        costs = results(capsys, "outside", tiny_bundle, "--rounds", 10, *options)["costs"]
        assert [cost["requests"] for cost in costs] == [1, 1, 1, 8, 8]
        for cost, most in zip(costs, (1, 9, 36, 1, 9), strict=True):
            assert most * 0.8 < cost["rows"] <= most
            assert 0 < cost["milliseconds"] <= cost["p95_milliseconds"]


def test_without_a_gpu_the_gpu_benchmark_says_so_and_writes_nothing(tmp_path: Path, capsys: Capture) -> None:
    if (reason := device.no_gpu()) is None:
        pytest.skip("there is a GPU")
    assert run(["bench", "gpu", str(tmp_path / "gpu.md"), "--work", str(tmp_path / "work")]) == MISSING
    assert capsys.readouterr().err == f"skipped: {reason}\n"
    assert list(tmp_path.iterdir()) == []


def test_the_gpu_benchmark_reads_the_json_of_a_command_or_its_last_error(tiny_bundle: Path, tmp_path: Path) -> None:
    found = run_command(["inspect", str(tiny_bundle)])
    assert (found.exit_code, found.failure, found.answer["model_type"]) == (OK, "", "llama")
    failed = run_command(["inspect", str(tmp_path / "none")])
    assert replace(failed, failure="") == CommandResult(INPUT, None, "")
    assert failed.failure.startswith("spaceport: ")


def test_phases_of_a_start_add_up(demo_bundle: Path, tmp_path: Path, capsys: Capture) -> None:
    before = set(cache_folder().glob("*"))
    options = "--rounds 1 --page-cache warm --threads 1 --max-requests 2 --max-seq-len 256"
    found = results(capsys, "start", demo_bundle, *options.split())
    conditions = [{"page_cache": "warm", "step_costs": stored} for stored in (True, False)]
    assert [one["condition"] for one in found["starts"]] == conditions
    for one in found["starts"]:
        times = one["medians"]
        assert all(seconds >= 0 for seconds in times.values())
        assert times["verify"] + times["engine"] + times["step_costs"] <= times["opening"] + 0.01
        assert times["imports"] + times["opening"] <= times["ready"] + 0.01
        assert times["total"] == pytest.approx(times["ready"] + times["first_token"])
    stored, missing = (one["medians"]["step_costs"] for one in found["starts"])
    assert stored < missing
    assert found["weight_bytes"] > 8_000_000
    assert set(cache_folder().glob("*")) == before  # those of the user are not touched
    assert page_caches_of("cold,warm,cold") == ["cold", "warm"]
    with pytest.raises(ProcessFailed, match=r"exit code 3: .*no such folder: expected a bundle"):
        measured([tmp_path / "nothing"], [], "a", tmp_path, tmp_path / "log")


def test_all_answers_of_services_are_right_while_clients_leave(
    prompts: Path, demo_bundle: Path, tmp_path: Path, capsys: Capture
) -> None:
    shares = "--cancelled 0.2 --dropped 0.1 --slow 0.1 --unstreamed 0.3"
    load = "--clients 1,12 --requests 24 --max-tokens 40 --rounds 1 --max-requests 4 --ramp 0 --queue-limit 2"
    table = tmp_path / "table.md"
    options = (*f"{load} {shares}".split(), "--bundle", demo_bundle, "--markdown", table)
    found = results(capsys, "serve", prompts, *options)
    assert found["identical"]
    by_key = {(one["subject"], one["clients"]): one for one in found["loads"]}
    assert set(by_key) == {(name, clients) for name in ("embedded", "spaceport") for clients in (1, 12)}
    for (name, clients), one in by_key.items():
        figures = one["figures"]
        counts = {each: figures[each] for each in ("answered", "left", "refused", "failed")}
        assert sum(counts.values()) == 24
        assert figures["compared"] == figures["answered"] > 0
        assert (counts["failed"], counts["left"] > 0) == (0, True)
        assert (counts["refused"] > 0) == (clients == 12)  # 4 at a time, 2 wait
        assert figures["drafts"]["mean_acceptance_length"] >= 1  # whether drafts pay depends on the machine
        assert one["statuses"].keys() <= {"200", "503"}
        assert figures["main_thread_per_token"] is not None, name
    service = next(one for one in found["resources"] if one["subject"] == "spaceport")
    first, _, last = service["samples"]  # after the warm-up and two runs
    left = sum(one["figures"]["left"] for one in found["loads"] if one["subject"] == "spaceport")
    most = first["file_descriptors"] + 2  # some close late
    assert last["file_descriptors"] <= most < first["file_descriptors"] + left
    assert "answers equal those of `Runtime.generate`" in table.read_text("utf-8")
    assert {one["reference"] for one in found["ratios"]} == {"embedded"}


def test_a_wrong_answer_of_a_service_is_reported(
    prompts: Path, demo_bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def swapped(self: EmbeddedRuntime, workload: Any) -> Any:
        found = right(self, workload)
        return [found[1], found[0], *found[2:]]

    right = EmbeddedRuntime.expected
    monkeypatch.setattr(EmbeddedRuntime, "expected", swapped)
    load = "--clients 2 --requests 4 --max-tokens 8 --rounds 1 --ramp 0 --no-embedded"
    assert run(["bench", "serve", str(prompts), "--bundle", str(demo_bundle), *load.split()]) == ACCURACY
    shown = capsys.readouterr().out
    assert "2 of 4 answers equal" in shown
    assert "spaceport, 2 clients, prompt 1:" in shown


DECODE, CHAT, SERVE = "decode TINY P", "chat DEMO P", "serve P"
MISTAKES = (
    ("load TINY --max-requests 1,0", USAGE, "--max-requests is '1,0': expected comma-separated numbers"),
    ("load TINY --places a", USAGE, "--max-requests is 'a': expected comma-separated numbers"),  # its former name
    ("prefix TINY --history 0", USAGE, "--history"),
    ("start none", INPUT, "no such folder"),
    ("start none --page-cache hot", USAGE, "expected warm, cold or warm,cold"),
    ("decode TINY", USAGE, "no prompt file: expected PROMPTS, or --replay with acceptance rates"),
    ("decode TINY none", INPUT, "none: No such file or directory: expected a prompt file"),
    (f"{DECODE} --max-tokens 5000", INPUT, "line 1: "),
    (f"{DECODE} --max-tokens 0", USAGE, "--max-tokens is 0: expected at least 1"),
    (f"{DECODE} --rounds 0", USAGE, "--rounds is 0: expected at least 1"),
    (f"{DECODE} --temperatures 0,hot", USAGE, "--temperatures is '0,hot': expected comma-separated numbers from 0"),
    (f"{DECODE} --fixed 0", USAGE, "--fixed is '0': expected comma-separated whole numbers of at least 1"),
    (f"{DECODE} --context 9", USAGE, "--context has no effect with PROMPTS"),
    (f"{DECODE} --plot none/decode.svg", USAGE, "does not exist: create it first"),
    ("decode TINY --replay 0.5,1.1", USAGE, "--replay is '0.5,1.1': expected comma-separated numbers from 0 to 1"),
    ("decode TINY --replay 0.5 --temperatures 1", USAGE, "a replay is greedy"),
    ("decode TINY --replay 1,1,1,1,1,1", USAGE, "--replay has 6 depths: expected at most 5"),
    ("decode TINY --replay 0.5 --modes masks", USAGE, "'masks' with --replay: expected plain and default"),
    ("decode TINY --replay 0.5 --context 4000 --max-tokens 96", USAGE, "--max-tokens 96 make 4096"),
    ("decode TINY --replay 0.5 --limit 100000", USAGE, "100000 prompts in a replay: expected at most"),
    (f"{CHAT} --max-tokens 0", USAGE, "--max-tokens is 0: expected at least 1"),
    (f"{CHAT} --modes masks,all", USAGE, "--modes names 'all': expected names among plain, lookup, masks, default"),
    (f"{CHAT} --modes forked", USAGE, "forked threads are measured on --fork-kinds"),
    (f"{CHAT} --fixed 9", USAGE, "--fixed names 9: expected 1 to the number of mask slots"),
    (f"{CHAT} --max-tokens 5000", INPUT, "line 1: "),
    (f"{CHAT} --work folder", USAGE, "--work has no effect without other runtimes: add --checkpoint FOLDER"),
    (f"{CHAT} --checkpoint MODEL", USAGE, "no --work: expected the folder with the environments"),
    (f"{CHAT} --checkpoint MODEL --work w --peer-sample 0", USAGE, "--peer-sample is 0: expected at least 1"),
    (SERVE, USAGE, "nothing to measure: expected --bundle BUNDLE, --url URL or both"),
    (f"{SERVE} --url localhost:8000", USAGE, "'localhost:8000' is no address of a service"),
    (f"{SERVE} --url =http://localhost:8000", USAGE, "has an empty name"),
    (f"{SERVE} --url http://127.0.0.1:1", INPUT, "expected a running service"),
    (f"{SERVE} --bundle x --setup", USAGE, "add --gguf FILE"),
    (f"{SERVE} --bundle x --gguf none.gguf", INPUT, "expected a GGUF file"),
    (f"{SERVE} --bundle x --rounds 0", USAGE, "--rounds is 0"),
)


@pytest.mark.parametrize(("arguments", "code", "message"), MISTAKES)
def test_mistakes_are_reported_before_anything_runs(
    tiny_bundle: Path, demo_bundle: Path, prompts: Path, capsys: Capture, arguments: str, code: int, message: str
) -> None:
    paths = {"TINY": tiny_bundle, "DEMO": demo_bundle, "P": prompts, "MODEL": DEMO}
    assert run(["bench", *(str(paths.get(part, part)) for part in arguments.split())]) == code
    out, err = capsys.readouterr()
    assert message in err
    assert out == ""
    assert "warming up" not in err
    assert "modes and runtimes" not in err
