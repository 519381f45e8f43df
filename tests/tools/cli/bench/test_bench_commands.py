"""`spaceport bench`: every benchmark is a command, and its results are consistent."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from spaceport.runtime.backends import device
from spaceport.tools.bench.gpu import CommandResult
from spaceport.tools.cli import run
from spaceport.tools.cli.bench import Benchmarks
from spaceport.tools.cli.exit_codes import MISSING, OK, USAGE

Capture = pytest.CaptureFixture[str]
HEAVY = ("numpy", "onnxruntime", "torch", "transformers")


def test_help_lists_every_benchmark_and_imports_no_heavy_library() -> None:
    program = (
        "import sys; from spaceport.tools.cli import run; code = run(['bench', '--help'])\n"
        f"print([name for name in {HEAVY} if name in sys.modules]); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    *lines, imported = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[lines.index("Commands:") + 1 :]] == list(Benchmarks.summaries)
    assert imported == "[]"


@pytest.mark.parametrize("name", Benchmarks.summaries)
def test_every_benchmark_is_a_command_of_its_name(name: str, capsys: Capture) -> None:
    assert run(["bench", name, "--help"]) == OK
    assert capsys.readouterr().out.startswith(f"Usage: spaceport bench {name} ")


def test_load_reports_throughput_and_latency_for_each_value_of_max_requests(demo_bundle: Path, capsys: Capture) -> None:
    command = ["--requests", "3", "--max-requests", "1,2", "--context", "8", "--tokens", "6", "--rounds", "1", "--json"]
    assert run(["bench", "load", str(demo_bundle), *command]) == OK
    results = json.loads(capsys.readouterr().out)["results"]
    assert [one["max_requests"] for one in results] == [1, 2]
    assert results[0]["ratio"] == 1.0
    for one in results:
        assert 0 < one["first_token_p50"] <= one["latency_p50"] <= one["latency_p95"]
        assert one["tokens_per_second"] > 0


@pytest.mark.parametrize("option", ["--max-requests", "--places"])
@pytest.mark.parametrize("counts", ["", "a", "0", "1,0"])
def test_load_needs_values_of_max_requests(demo_bundle: Path, capsys: Capture, option: str, counts: str) -> None:
    """`--places` is the former name of `--max-requests`."""
    assert run(["bench", "load", str(demo_bundle), option, counts]) == USAGE
    assert f"--max-requests is {counts!r}: expected comma-separated numbers" in capsys.readouterr().err


def test_the_next_turn_of_a_chat_reuses_its_history_in_the_prefix_benchmark(demo_bundle: Path, capsys: Capture) -> None:
    command = ["bench", "prefix", str(demo_bundle), "--history", "40,60", "--rounds", "1", "--threads", "1", "--json"]
    assert run(command) == OK
    results = json.loads(capsys.readouterr().out)["results"]
    assert [(one["history"], one["reused"]) for one in results] == [(40, 55), (60, 75)]
    assert all(one["cold_seconds"] > 0 and one["copy_seconds"] > 0 for one in results)
    assert run(["bench", "prefix", str(demo_bundle), "--history", "0"]) == USAGE


@pytest.mark.parametrize("real", [[], ["--real"]])
def test_steps_of_bench_outside_have_the_stated_numbers_of_requests_and_rows(
    demo_bundle: Path, capsys: Capture, real: list[str]
) -> None:
    assert run(["bench", "outside", str(demo_bundle), "--rounds", "10", "--json", *real]) == OK
    costs = json.loads(capsys.readouterr().out)["costs"]
    assert [cost["requests"] for cost in costs] == [1, 1, 1, 8, 8]
    for cost, most in zip(costs, (1, 9, 36, 1, 9), strict=True):
        assert most * 0.8 < cost["rows"] <= most
    assert all(0 < cost["milliseconds"] <= cost["p95_milliseconds"] for cost in costs)


def test_without_a_gpu_the_gpu_benchmark_says_so_and_writes_nothing(tmp_path: Path, capsys: Capture) -> None:
    if (reason := device.no_gpu()) is None:
        pytest.skip("there is a GPU")
    assert run(["bench", "gpu", str(tmp_path / "gpu.md"), "--work", str(tmp_path / "work")]) == MISSING
    assert capsys.readouterr().err == f"skipped: {reason}\n"
    assert list(tmp_path.iterdir()) == []


def test_the_gpu_benchmark_reads_the_json_of_a_command_or_its_last_error(demo_bundle: Path, tmp_path: Path) -> None:
    from spaceport.tools.cli.bench.gpu import run_command

    found = run_command(["inspect", str(demo_bundle)])
    assert (found.exit_code, found.failure) == (OK, "")
    assert found.answer["model_type"] == "llama"
    failed = run_command(["inspect", str(tmp_path / "none")])
    assert failed == CommandResult(failed.exit_code, None, failed.failure)
    assert failed.exit_code != OK
    assert failed.failure.startswith("spaceport: ")
