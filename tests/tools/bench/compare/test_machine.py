"""Machine: the CPU's name and the extensions that matter."""

from __future__ import annotations

from pathlib import Path

from spaceport.tools.bench.compare.machine import this_machine


def test_the_first_cpu_of_cpuinfo_is_described(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    one = "processor\t: 0\nmodel name\t: Fast CPU 3\ncpu family\t: 6\nmodel\t\t: 207\nflags\t\t: fpu avx2 avx512_vnni amx_int8 sse\n\n"
    file.write_text(one + one.replace("Fast", "Other"), "utf-8")
    found = this_machine(file)
    assert found.cpu == "Fast CPU 3"
    assert found.model == "family 6, model 207"
    assert found.flags == ("avx2", "avx512_vnni", "amx_int8")
    assert found.cores >= 1


def test_this_machine_has_a_name() -> None:
    assert this_machine().cpu
    assert "Python 3" in this_machine().system
