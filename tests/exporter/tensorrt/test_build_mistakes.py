"""Build mistakes: errors are reported before the build and name the flags of the command line."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from spaceport.exporter.atomic_folder import TargetError
from spaceport.exporter.tensorrt.append_graph import UnbuildableGraph, append_graph
from spaceport.exporter.tensorrt.build import build_engine
from spaceport.exporter.tensorrt.builder_monitor import BuildMessages, logger_of
from spaceport.exporter.tensorrt.profiles import Shapes
from spaceport.exporter.tensorrt.to_tensorrt import (
    BuildFault,
    BuildOptions,
    Library,
    build,
    build_fault,
    open_library,
    read_cache,
    target_of,
)
from spaceport.graphs.contract.faults import InputFault, OptionFault
from spaceport.graphs.contract.manifest import MODEL_FILE, FileRecord
from spaceport.runtime.backends.device import no_gpu
from spaceport.runtime.bundle import open_bundle
from spaceport.tools.cli import run
from spaceport.tools.cli.exit_codes import INPUT, MISSING, OK, USAGE
from support.append_bundle import Attending
from support.small_bundle import edit

pytest.importorskip("tensorrt_rtx", reason="builds with TensorRT-RTX: pip install 'spaceport[tensorrt-rtx]'")

RECIPE = BuildOptions("sm89", Shapes(1024, 4, 64, 512))
KNOWN = "sm75, sm80, sm86, sm89, sm120, sm121"
WITHOUT_GPU = pytest.mark.skipif(no_gpu() is None, reason="there is a GPU here")

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Record trusted engines in a folder of the test instead of the user's."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    Attending().write(tmp_path / "bundle")
    return tmp_path / "bundle"


@pytest.fixture(scope="module")
def library() -> Library:
    return open_library("tensorrt-rtx")


def refused(capfd: Capture, code: int, message: str, bundle: Path, *options: object) -> None:
    """Verify that a build ends with this exit code and message, and changes nothing."""
    before = {path: path.read_bytes() for path in bundle.rglob("*") if path.is_file()}
    assert run(["build", str(bundle), *map(str, options)]) == code
    output, errors = capfd.readouterr()
    assert output == ""
    assert "Traceback" not in errors
    assert re.search(message, errors.splitlines()[-1]), errors
    assert {path: path.read_bytes() for path in bundle.rglob("*") if path.is_file()} == before
    assert not (bundle / "engines").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--target", "sm90"),
            f"--target is sm90: tensorrt-rtx .* cannot build for it; expected {KNOWN}, or current; TensorRT itself .*--backend tensorrt",
        ),
        (("--target", "hopper"), f"--target is hopper: .*; expected {KNOWN}, or current"),
        (("--target", "sm89,"), "--target is 'sm89,': expected names separated by commas, such as sm80,sm89"),
        (("--target", "sm89", "--target", "sm90"), "--target is sm90: "),
        (("--target", "sm90", "--target", "sm89"), "--target is sm90: "),
        (("--target", "sm89", "--max-requests", 0), "--max-requests is 0: expected 1 to 1024"),
        (("--target", "sm89", "--max-seq-len", 1), "--max-seq-len is 1: expected 2 to 1024"),
        (("--target", "sm89", "--max-seq-len", 1025), "--max-seq-len is 1025: expected 2 to 1024"),
        (
            ("--target", "sm89", "--max-seq-len", 300, "--max-slots", 200),
            "--max-slots is 200: expected at least --max-seq-len",
        ),
        (
            ("--target", "sm89", "--prefill-rows", 64),
            "--prefill-rows is 64: expected 128, the maximum of a decode step, to",
        ),
        (
            ("--target", "sm89", "--prefill-rows", 9999),
            r"--prefill-rows is 9999: expected 128, .* to 1728, .*--max-seq-len",
        ),
        (("--target", "sm89", "--max-step-rows", 513), "--max-step-rows is 513: expected 1 to 512"),
        (
            ("--target", "sm89", "--dtype", "bfloat16"),
            "--dtype is bfloat16, the bundle's graph is float16: .* export the checkpoint again with --dtype bfloat16",
        ),
        (
            ("--target", "sm89", "--timing-cache", "times"),
            "--timing-cache has no effect with tensorrt-rtx, which does not time kernels: leave it out",
        ),
        (
            ("--target", "sm89", "--workspace", 1),
            "--workspace is 1 MB: tensorrt-rtx .* needs more; raise it, or leave",
        ),
    ],
    ids=str,
)
def test_invalid_build_options_are_refused(
    capfd: Capture, bundle: Path, options: tuple[object, ...], message: str
) -> None:
    refused(capfd, USAGE, message, bundle, *options)


@WITHOUT_GPU
def test_without_a_gpu_the_error_lists_the_possible_targets(capfd: Capture, bundle: Path) -> None:
    refused(capfd, USAGE, f"--target current: .*(driver|GPU).*; expected {KNOWN}$", bundle)
    refused(capfd, USAGE, f"--target current: .*(driver|GPU).*; expected {KNOWN}$", bundle, "--target", "sm89,current")
    refused(
        capfd,
        USAGE,
        "--refittable: .* needs a GPU for refittable engines, and .*(driver|GPU).*: leave it out",
        bundle,
        "--refittable",
    )


def test_targets_may_be_in_capitals_and_repeated(capfd: Capture, bundle: Path) -> None:
    assert (
        run(
            [
                "build",
                str(bundle),
                "--target",
                "SM80, sm89",
                "--target",
                "sm86",
                "--target",
                "sm80",
                "--max-requests",
                "1",
            ]
        )
        == OK
    )
    output, errors = capfd.readouterr()
    assert re.findall(r"engines/(sm\d+)-", output) == ["sm80", "sm89", "sm86"]
    assert "KV cache for 1 request of 1728 slots" in errors


def test_an_unknown_target_must_be_the_gpu_of_this_machine(library: Library) -> None:
    full = Library("tensorrt", SimpleNamespace(__version__="11.0"))
    assert library.targets == tuple(KNOWN.split(", "))
    assert target_of(library, "current", "sm89", "") == "sm89"
    with pytest.raises(
        OptionFault, match=r"this GPU is sm90, for which tensorrt-rtx .* has no kernels; expected sm75.*--backend"
    ):
        target_of(library, "current", "sm90", "")
    assert target_of(library, "sm89", None, "no driver") == "sm89"
    assert target_of(full, "current", "sm90", "") == "sm90"
    assert target_of(full, "sm90", "sm90", "") == "sm90"
    with pytest.raises(OptionFault, match=r"--target is sm89: tensorrt 11\.0 .* it builds for the GPU of the machine"):
        target_of(full, "sm89", "sm90", "")
    with pytest.raises(OptionFault, match="--target current: no driver; it builds for the GPU of the machine"):
        target_of(full, "current", None, "no driver")


def test_without_tensorrt_the_error_says_how_to_install_it(
    capfd: Capture, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    refused(capfd, MISSING, r"tensorrt does not import .*pip install .*\[tensorrt\]'$", bundle, "--backend", "tensorrt")
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    both = r"needs TensorRT; tensorrt does .*pip install .*\[tensorrt\]'; or tensorrt_rtx .*\[tensorrt-rtx\]'$"
    refused(capfd, MISSING, both, bundle, "--target", "sm89")


def test_a_scatter_bundle_is_refused(capfd: Capture, bundle: Path) -> None:
    edit(bundle, lambda manifest: manifest["signature"].update(lowering="scatter"))
    (bundle / "model.onnx.data").write_bytes(b"")  # reported before the weights are read
    message = "has the scatter lowering, TensorRT needs append: export it again with --lowering append"
    refused(capfd, INPUT, message, bundle, "--target", "sm89")


def _nothing(bundle: Path) -> None:
    (bundle / "manifest.json").unlink()


def _cut(bundle: Path) -> None:
    (bundle / "model.onnx.data").write_bytes(b"")


def _link(bundle: Path) -> None:
    (bundle / "engines.engine").symlink_to("/etc/hostname")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_nothing, r"no manifest\.json in it: expected a bundle"),
        (_cut, r"model\.onnx\.data: 0 bytes, the manifest says"),
        (_link, "not a regular file"),
    ],
)
def test_a_bundle_that_does_not_open_is_refused(
    capfd: Capture, bundle: Path, spoil: Callable[[Path], None], message: str
) -> None:
    spoil(bundle)
    refused(capfd, INPUT, message, bundle, "--target", "sm89")


def test_missing_disk_space_is_reported_before_the_build(bundle: Path, library: Library) -> None:
    manifest = open_bundle(bundle).manifest
    vast = {**manifest.files, "model.onnx.data": FileRecord("a" * 64, 10**18)}
    started: list[str] = []
    with pytest.raises(
        TargetError, match=r"MB free, the engine needs about 10000000000.. MB: free some space or choose"
    ):
        build_engine(bundle, replace(manifest, files=vast), library, RECIPE, on_start=lambda: started.append("build"))
    assert started == []


def test_an_unsupported_node_is_named(bundle: Path, library: Library) -> None:
    signature = Attending().signature
    model = append_graph(bundle, signature, 1024)
    (node,) = [node for node in model.graph.node if node.op_type == "Attention"]
    node.op_type = "Detention"
    with pytest.raises(UnbuildableGraph) as raised:
        build(library, model, bundle, signature, RECIPE)
    assert re.search(
        rf"{MODEL_FILE}: tensorrt-rtx .* cannot parse attention0 \(Detention\): .*expected", str(raised.value)
    )
    assert "\n" not in str(raised.value)


def test_a_missing_weights_file_is_an_error(bundle: Path, library: Library) -> None:
    signature = Attending().signature
    model = append_graph(bundle, signature, 1024)
    (bundle / "model.onnx.data").unlink()
    with pytest.raises(UnbuildableGraph, match="cannot parse"):
        build(library, model, bundle, signature, RECIPE)


def test_a_type_that_the_target_does_not_support_is_reported(bundle: Path, library: Library, tmp_path: Path) -> None:
    attending = Attending("bfloat16")
    attending.write(tmp_path / "brain")
    model = append_graph(tmp_path / "brain", attending.signature, 1024)
    with pytest.raises(
        OptionFault, match=r"--target is sm75: .* does not support a type .* exported with --dtype float16 and"
    ):
        build(library, model, tmp_path / "brain", attending.signature, replace(RECIPE, target="sm75"))


def test_an_unexpected_build_error_contains_the_builders_messages(library: Library) -> None:
    messages = BuildMessages(errors=["first error", "kernel\nfailed"])
    fault = build_fault(library, RECIPE, messages)
    assert isinstance(fault, BuildFault)
    assert re.search("could not build for sm89: first error kernel failed: expected", str(fault))
    assert "no error message" in str(build_fault(library, RECIPE, BuildMessages()))


@pytest.mark.filterwarnings("ignore:.*no-ops in TensorRT-RTX:DeprecationWarning")
def test_an_invalid_timing_cache_is_refused_and_a_new_file_starts_one(library: Library, tmp_path: Path) -> None:
    """TensorRT-RTX has these calls without effect, but reads the file."""
    messages = BuildMessages()
    logger = logger_of(library.module, messages)
    config = library.module.Builder(logger).create_builder_config()
    file = tmp_path / "times"
    assert read_cache(config, messages, file) is not None
    assert not file.exists()
    file.write_bytes(b"nothing of the kind" * 20)
    with pytest.raises(InputFault, match=r"times: not a timing cache of this TensorRT and GPU: .* choose another"):
        read_cache(config, messages, file)


def test_help_lists_every_option(capfd: Capture) -> None:
    assert run(["build", "--help"]) == OK
    output = capfd.readouterr().out
    for option in ("--backend", "--target", "--max-requests", "--prefill-rows", "--refittable", "--rebuild", "--json"):
        assert option in output
