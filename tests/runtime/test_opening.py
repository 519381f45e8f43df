"""Opening: whatever happens to the folder meanwhile, a runtime has one bundle's manifest, tokenizer and weights."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spaceport.exporter.atomic_folder import writing
from spaceport.graphs.contract.manifest import DATA_FILE, MODEL_FILE, record_of
from spaceport.runtime import Decoding, Runtime
from spaceport.runtime.bundle import BundleError, open_bundle
from spaceport.runtime.engine import Batch, seq_len
from support.small_bundle import edit

PROMPT = [5, 6, 7, 8]


def open_runtime(bundle: Path, **options: Any) -> Runtime:
    return Runtime.open(bundle, backend="onnxruntime", max_seq_len=64, threads=1, step_costs="standard", **options)


def scored(bundle: Path, **options: Any) -> tuple[int, float]:
    """The number of parameters that the manifest says, and a log probability that the weights give."""
    with open_runtime(bundle, **options) as runtime:
        return runtime.bundle.manifest.parameters, runtime.score(PROMPT).logprobs[-1].logprob


@pytest.fixture
def bundle(tiny_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))


def scale_weights(bundle: Path) -> None:
    """Change the weights of a float bundle in their file."""
    weights = np.fromfile(bundle / DATA_FILE, np.float32)
    with (bundle / DATA_FILE).open("r+b") as file:
        file.write((weights * np.float32(1.5)).tobytes())


def other(bundle: Path, target: Path) -> Path:
    """A bundle with other weights and another number of parameters."""
    shutil.copytree(bundle, target)
    scale_weights(target)
    with (target / DATA_FILE).open("rb") as stream:
        sha256 = record_of(stream).sha256
    edit(target, lambda entries: (entries.update(parameters=1), entries["files"][DATA_FILE].update(sha256=sha256)))
    return target


@pytest.mark.slow
@pytest.mark.parametrize("opens", [15, pytest.param(300, marks=pytest.mark.nightly)])
def test_no_open_combines_two_bundles_that_replace_each_other(bundle: Path, tmp_path: Path, opens: int) -> None:
    """133 of 275 opens did."""
    sources, stop = (shutil.copytree(bundle, tmp_path / "first"), other(bundle, tmp_path / "second")), threading.Event()
    expected = {scored(source) for source in sources}
    assert len(expected) == 2

    def swap() -> None:
        pauses = random.Random(0)
        while not stop.is_set():
            for source in sources:
                with writing(bundle, overwrite=True) as partial:
                    shutil.copytree(source, partial, dirs_exist_ok=True)
                stop.wait(pauses.uniform(0, 1))

    found: list[tuple[int, float]] = []
    thread = threading.Thread(target=swap)
    thread.start()
    try:
        for _ in range(opens):
            with suppress(BundleError):  # replaced several times in a row
                found.append(scored(bundle))
    finally:
        stop.set()
        thread.join()
    assert len(found) > opens / 2, "most are opened again"
    assert set(found) <= expected


def test_links_and_copied_weights_give_the_same_output(bundle: Path, tmp_path: Path) -> None:
    expected = scored(bundle)
    assert scored(bundle, copy_weights=True) == expected
    store = tmp_path / "blobs"
    shutil.move(bundle, store)
    bundle.mkdir()
    for file in store.iterdir():
        (bundle / file.name).symlink_to(Path("..", "blobs", file.name))
    with pytest.raises(BundleError, match=r"not a regular file: .* allow links"):
        open_runtime(bundle)
    assert scored(bundle, allow_links=True) == expected


def test_a_request_after_a_change_of_the_weights_is_refused(bundle: Path) -> None:
    with open_runtime(bundle) as runtime, open_runtime(bundle, copy_weights=True) as copied:
        before = copied.score(PROMPT)
        size = (bundle / DATA_FILE).stat().st_size
        with (bundle / DATA_FILE).open("r+b") as file:
            file.write(bytes(size))
        for request in (runtime.score, runtime.generate):
            with pytest.raises(BundleError, match="it was changed while the runtime used it: close the runtime"):
                request(PROMPT)
        assert copied.score(PROMPT) == before


def test_weights_that_change_during_a_request_fail_it_before_they_show(bundle: Path) -> None:
    decoding = Decoding(max_tokens=24, lookup=0, mask_slots=0, fork=False)
    with open_runtime(bundle) as runtime, open_runtime(bundle, copy_weights=True) as copied:
        expected = copied.generate(PROMPT, decoding).tokens
        compute, calls, read = runtime.engine.run, list[Batch](), list[int | None]()

        def changing(batch: Batch) -> Any:
            calls.append(batch)
            if len(calls) == 5:
                scale_weights(bundle)
            return compute(batch)

        runtime.engine.run = changing  # type: ignore[method-assign]
        with pytest.raises(BundleError, match="it was changed while the runtime used it"):
            read.extend(piece.token for piece in runtime.stream(PROMPT, decoding))
        assert len(calls) == 5
        assert read == list(expected[:4])


# Prints the tokens of the same prompt again and again, then the error that ends it.
_SERVES = """
import sys
from spaceport.runtime import Decoding, Runtime, SpaceportError
with Runtime.open(sys.argv[1], backend="onnxruntime", max_seq_len=64, threads=1, step_costs="standard") as runtime:
    try:
        while True:
            print(list(runtime.generate([5, 6, 7, 8], Decoding(max_tokens=24, fork=False)).tokens), flush=True)
    except SpaceportError as error:
        print(type(error).__name__, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny_bundle", "tiny_int8_bundle"])
def test_a_bundle_that_is_truncated_while_it_is_served_never_gives_another_text(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """It may end the process (SIGBUS)."""
    bundle = shutil.copytree(request.getfixturevalue(name), tmp_path / "bundle")
    command = [sys.executable, "-c", _SERVES, str(bundle)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        os.truncate(bundle / DATA_FILE, 0)
        lines += [line for line in process.stdout if line.endswith("\n")]
    assert lines[0].startswith("[")
    assert {*lines} <= {lines[0], "BundleError\n"}
    with pytest.raises(BundleError, match="the manifest says"):
        open_runtime(bundle)


def test_weights_in_a_file_that_the_manifest_does_not_list_are_refused(bundle: Path) -> None:
    edit(bundle, lambda entries: entries["files"].pop(DATA_FILE))
    with pytest.raises(
        BundleError, match=rf"{MODEL_FILE}: loads weights from '{DATA_FILE}', which the manifest does not"
    ):
        open_runtime(bundle)
    assert open_bundle(bundle).manifest.files


@pytest.mark.parametrize(
    ("layers", "positions", "requests", "max_slots", "lowering", "expected"),
    [
        (24, 2048, 1, None, "scatter", 2048),  # the model's
        (24, 2**31 - 1, 1, None, "scatter", 32_768),
        (24, 32_768, 8, None, "scatter", 10_240),  # 2 GiB
        (24, 32_768, 8, 20_000, "scatter", 10_240),
        (24, 32_768, 1, 6000, "scatter", 6000),
        (24, 32_768, 1, 100, "scatter", 4096),  # more than max_slots, which is refused
        (96, 131_072, 64, None, "scatter", 4096),
        (24, 32_768, 1, None, "append", 4096),
    ],
)
def test_the_default_context_is_the_models_unless_kv_buffers_become_large(
    bundle: Path, layers: int, positions: int, requests: int, max_slots: int | None, lowering: str, expected: int
) -> None:
    manifest = open_bundle(bundle).manifest
    sizes = {"layers": layers, "kv_heads": 2, "head_dim": 64, "lowering": lowering, "dtype": "float32"}
    manifest = replace(manifest, max_positions=positions, signature=replace(manifest.signature, **sizes))
    assert seq_len(manifest, None, max_slots, requests) == expected
    assert seq_len(manifest, 100, max_slots, requests) == 100
