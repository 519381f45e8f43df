"""Build: TensorRT-RTX builds engines without a GPU, which are stored with their records and reused, or the error says why."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import onnx
import pytest
import torch
from onnx import helper

from spaceport.exporter.atomic_folder import TargetError
from spaceport.exporter.export import ExportOptions
from spaceport.exporter.tensorrt import to_tensorrt
from spaceport.exporter.tensorrt.append_graph import append_graph
from spaceport.exporter.tensorrt.engines import build_engine
from spaceport.exporter.tensorrt.to_tensorrt import (
    AttentionPlan,
    BuildMessages,
    BuildOptions,
    BuildProgress,
    Library,
    Shapes,
    attention_of,
    build,
    build_fault,
    logger_of,
    open_library,
    read_cache,
    target_of,
)
from spaceport.exporter.to_onnx import to_onnx
from spaceport.graphs.contract.faults import InputFault, OptionFault
from spaceport.graphs.contract.formats import FORMATS
from spaceport.graphs.contract.manifest import ENGINES_FOLDER, MANIFEST_FILE, FileRecord
from spaceport.graphs.contract.signature import Signature
from spaceport.graphs.decoder import decoder_of
from spaceport.runtime.backends.built_engines import built_here
from spaceport.runtime.backends.machine import no_gpu
from spaceport.runtime.bundle import open_bundle, read_manifest
from spaceport.tools.cli import FAULT, MISSING, OK, USAGE, run
from support import families
from support.append_bundle import Attending
from support.exported import bundle_of
from support.families import FAMILIES, Family
from support.paths import TINY

pytest.importorskip("tensorrt_rtx", reason="builds with TensorRT-RTX: pip install 'spaceport[tensorrt-rtx]'")

RECIPE = BuildOptions("sm89", Shapes(1024, 4, 64, 512))
KNOWN = "sm75, sm80, sm86, sm89, sm120, sm121"
AT = ("--target", "sm89")

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


def contents(folder: Path) -> dict[str, bytes]:
    """Every file and folder of a bundle."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def test_an_engine_is_stored_in_the_bundle_with_its_record(bundle: Path, capfd: Capture) -> None:
    before = contents(bundle)
    options = ["--max-requests", "3", "--max-seq-len", "300", "--max-step-rows", "36", "--prefill-rows", "256"]
    assert run(["build", str(bundle), *AT, *options]) == OK
    manifest = open_bundle(bundle).manifest
    ((name, record),) = manifest.engines.items()
    plan = (bundle / ENGINES_FOLDER / name).read_bytes()
    assert (record.sha256, record.size) == (hashlib.sha256(plan).hexdigest(), len(plan))
    assert record.graph == (manifest.files["model.onnx"].sha256, manifest.files["model.onnx.data"].sha256)
    assert (record.backend, record.target, record.version) == ("tensorrt-rtx", "sm89", open_library().version)
    assert (record.capacity, record.requests, record.step_rows, record.prefill_rows) == (960, 3, 36, 256)
    assert record.decomposed == 0
    assert built_here(record.sha256)
    after = contents(bundle)
    assert set(after) - set(before) == {ENGINES_FOLDER, f"{ENGINES_FOLDER}/{name}"}
    assert all(after[file] == content for file, content in before.items() if file != MANIFEST_FILE)
    output, errors = capfd.readouterr()
    assert output.startswith(f"{bundle}/engines/{name}: tensorrt-rtx {record.version}, ")
    assert "of activation memory" in output
    first, *rest = errors.splitlines()
    assert re.search(
        rf"^ +[\d.]+ s  building with tensorrt-rtx {record.version} for sm89: .* KB of KV cache for 3 requests of 960 slots, up to .* "
        "KB of logits; the build takes about 34.* MB of host memory",
        first,
    )
    assert rest
    assert all(" built: " in line or "... building with" in line for line in rest), "no messages of the library itself"


def test_an_engine_is_built_again_only_if_it_is_asked_for_untrusted_or_damaged(
    bundle: Path, capfd: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def built(*options: str) -> tuple[str, str]:
        assert run(["build", str(bundle), "--target", "SM89, sm89", *options]) == OK
        output, errors = capfd.readouterr()
        return output, errors

    assert "building with" in built()[1]
    once = contents(bundle)
    output, errors = built()
    assert output.endswith(", exists already\n")
    assert errors == ""
    assert contents(bundle) == once
    (entry,) = json.loads(built("--json")[0])["engines"]
    (name,) = open_bundle(bundle).manifest.engines
    assert (entry["built"], entry["name"], entry["activation"]) == (False, name, None)
    assert "building with" in built("--rebuild")[1]
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another machine's"))
    errors = built()[1]
    assert "building with" in errors
    assert "the existing engine was not built on this machine: building it again" in errors
    file = bundle / ENGINES_FOLDER / name
    file.write_bytes(bytes(file.stat().st_size))
    assert "building with" in built()[1]
    assert "exists already" in built()[0]


# argv: the maximum file size in bytes, arguments. Runs the program as on a full disk.
ON_A_FULL_DISK = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)), resource.RLIM_INFINITY))
from spaceport.tools.cli import main; main()
"""


def test_a_full_disk_leaves_the_bundle_with_an_engine_unchanged(bundle: Path, library: Library) -> None:
    build_engine(bundle, open_bundle(bundle).manifest, library, RECIPE)
    before = contents(bundle)
    command = [sys.executable, "-c", ON_A_FULL_DISK, "1000000", "build", str(bundle), "--target", "sm80"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == FAULT
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert "File too large while" in last
    assert last.endswith("MB were written: free some space and build again")
    assert contents(bundle) == before
    open_bundle(bundle)


@pytest.mark.parametrize("interrupted", [True, False])
def test_an_interrupt_or_a_fault_of_the_callback_ends_a_build_and_leaves_the_bundle_unchanged(
    bundle: Path, library: Library, interrupted: bool
) -> None:
    before, reported = contents(bundle), list[float]()

    def report(done: float, phase: str) -> None:
        reported.append(done)
        if interrupted and len(reported) == 20:
            signal.raise_signal(signal.SIGINT)
        if not interrupted:
            raise BrokenPipeError("the reader went away")

    with pytest.raises(KeyboardInterrupt if interrupted else BrokenPipeError):
        build_engine(bundle, open_bundle(bundle).manifest, library, RECIPE, on_progress=report)
    assert len(reported) < 50, "the builder stopped when it was cancelled"
    assert reported == sorted(reported)
    assert contents(bundle) == before
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_folder_that_is_read_only_or_too_small_is_refused_before_the_build(
    bundle: Path, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, started = open_bundle(bundle).manifest, list[str]()
    vast = replace(manifest, files={**manifest.files, "model.onnx.data": FileRecord("a" * 64, 10**18)})
    with pytest.raises(TargetError, match=r"MB free, the engine needs about 10000000000.. MB: free some space or choo"):
        build_engine(bundle, vast, library, RECIPE, on_start=lambda: started.append("build"))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(InputFault, match="no permission to write in it: copy the bundle to a folder that is writable"):
        build_engine(bundle, manifest, library, RECIPE, on_start=lambda: started.append("build"))
    assert started == []


def copy_a_buffer(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = ["written" if name == "present.0.key" else name for name in names]
    model.graph.node.append(helper.make_node("Identity", ["written"], ["present.0.key"]))


def write_keys_to_the_buffer_of_values(model: onnx.ModelProto) -> None:
    (node,) = [node for node in model.graph.node if node.output[0] == "present.0.key"]
    node.input[0] = "past_key_values.0.value"


def rename_the_attention(model: onnx.ModelProto) -> None:
    (node,) = [node for node in model.graph.node if node.op_type == "Attention"]
    node.op_type = "Detention"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (copy_a_buffer, r"does not write present.0.key to the memory of past_key_values.0.key"),
        (write_keys_to_the_buffer_of_values, r"does not write present.0.key to the memory of past_key_values.0.key"),
        (rename_the_attention, r"model.onnx: tensorrt-rtx .* cannot parse attention0 \(Detention\): .*expected"),
        (None, "cannot parse"),
    ],
)
def test_a_graph_that_cannot_be_built_is_named_in_one_line(
    bundle: Path, library: Library, spoil: Callable[[onnx.ModelProto], None] | None, message: str
) -> None:
    signature = Attending().signature
    model = append_graph(bundle, signature, 1024)
    if spoil is None:
        (bundle / "model.onnx.data").unlink()
    else:
        spoil(model)
    with pytest.raises(InputFault, match=message) as raised:
        build(library, model, bundle, signature, RECIPE)
    assert "\n" not in str(raised.value)


def refused(capfd: Capture, code: int, message: str, bundle: Path, *options: object) -> None:
    """Verify that a build ends with this exit code and message, and changes nothing."""
    before = contents(bundle)
    assert run(["build", str(bundle), *map(str, options)]) == code
    output, errors = capfd.readouterr()
    assert output == ""
    assert "Traceback" not in errors
    assert re.search(message, errors.splitlines()[-1]), errors
    assert contents(bundle) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--target", "sm90"), f"--target is sm90: .* cannot build for it; expected {KNOWN}, or current"),
        (("--target", "sm89,"), "--target is 'sm89,': expected names separated by commas, such as sm80,sm89"),
        (("--target", "sm90", *AT), "--target is sm90: "),
        ((*AT, "--max-requests", 0), "--max-requests is 0: expected 1 to 1024"),
        ((*AT, "--max-seq-len", 1), "--max-seq-len is 1: expected 2 to 1024"),
        ((*AT, "--max-seq-len", 1025), "--max-seq-len is 1025: expected 2 to 1024"),
        ((*AT, "--max-seq-len", 300, "--max-slots", 200), "--max-slots is 200: expected at least --max-seq-len"),
        ((*AT, "--format", "bfloat16"), "the bundle's is float16: .* export the checkpoint again with --format bf"),
        ((*AT, "--timing-cache", "times"), "--timing-cache has no effect with tensorrt-rtx, .*: leave it out"),
        ((*AT, "--workspace", 1), "--workspace is 1 MB: tensorrt-rtx .* needs more; raise it, or leave"),
    ],
    ids=str,
)
def test_invalid_build_options_are_refused(
    capfd: Capture, bundle: Path, options: tuple[object, ...], message: str
) -> None:
    refused(capfd, USAGE, message, bundle, *options)


@pytest.mark.skipif(no_gpu() is None, reason="there is a GPU here")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), f"--target current: .*(driver|GPU).*; expected {KNOWN}$"),
        (("--target", "sm89,current"), f"--target current: .*(driver|GPU).*; expected {KNOWN}$"),
    ],
)
def test_without_a_gpu_the_error_lists_the_possible_targets(
    capfd: Capture, bundle: Path, options: tuple[str, ...], message: str
) -> None:
    refused(capfd, USAGE, message, bundle, *options)


def test_without_tensorrt_the_error_says_how_to_install_it(
    capfd: Capture, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    refused(capfd, MISSING, r"tensorrt does not import .*pip install .*\[tensorrt\]'$", bundle, "--backend", "tensorrt")
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    both = r"needs TensorRT; tensorrt does .*pip install .*\[tensorrt\]'; or tensorrt_rtx .*\[tensorrt-rtx\]'$"
    refused(capfd, MISSING, both, bundle, *AT)


def test_an_unknown_target_must_be_the_gpu_of_this_machine(library: Library) -> None:
    full = Library("tensorrt", SimpleNamespace(__version__="11.0"))
    assert library.targets == tuple(KNOWN.split(", "))
    assert target_of(library, "current", "sm89", "") == "sm89"
    with pytest.raises(OptionFault, match=r"this GPU is sm90, for which .* has no kernels; expected sm75.*--backend"):
        target_of(library, "current", "sm90", "")
    assert target_of(library, "sm89", None, "no driver") == "sm89"
    assert target_of(full, "current", "sm90", "") == "sm90"
    assert target_of(full, "sm90", "sm90", "") == "sm90"
    with pytest.raises(OptionFault, match=r"--target is sm89: tensorrt 11\.0 .* it builds for the GPU of the machine"):
        target_of(full, "sm89", "sm90", "")
    with pytest.raises(OptionFault, match="--target current: no driver; it builds for the GPU of the machine"):
        target_of(full, "current", None, "no driver")


@pytest.mark.filterwarnings("ignore:.*no-ops in TensorRT-RTX:DeprecationWarning")
def test_an_invalid_timing_cache_is_refused_and_a_new_file_starts_one(library: Library, tmp_path: Path) -> None:
    """TensorRT-RTX has these calls without effect, but reads the file."""
    logger, file = logger_of(library.module), tmp_path / "times"
    messages = logger.messages = BuildMessages()
    config = library.module.Builder(logger).create_builder_config()
    assert read_cache(config, messages, file) is not None
    assert not file.exists()
    file.write_bytes(b"nothing of the kind" * 20)
    with pytest.raises(InputFault, match=r"times: not a timing cache of this TensorRT and GPU: .* choose another"):
        read_cache(config, messages, file)


def test_messages_of_the_builder_are_recorded_and_part_of_an_unexpected_error(library: Library) -> None:
    messages = BuildMessages()
    assert "no error message" in str(build_fault(library, RECIPE, messages))
    activation = [(3, "Total Activation Memory: 700 bytes"), (3, "Total Activation Memory: 300 bytes")]
    for severity, text in ((0, "internal"), (1, "kernel\nfailed"), (2, "warning"), *activation, (4, "verbose")):
        messages.add(severity, text)
    assert messages == BuildMessages(["internal", "kernel\nfailed"], ["warning"], 700)
    fault = build_fault(library, RECIPE, messages)
    assert isinstance(fault, InputFault)
    assert re.search("could not build for sm89: internal kernel failed: expected", str(fault))


def test_nested_phases_progress_the_step_that_contains_them() -> None:
    reported: list[tuple[float, str]] = []
    progress = BuildProgress(lambda done, phase: reported.append((done, phase)), lambda: False)
    progress.begin("all", None, 4)
    progress.begin("parse", "all", 2)
    progress.step("parse", 0)
    progress.begin("nodes", "parse", 10)
    progress.step("nodes", 4)
    progress.end("nodes")
    progress.end("parse")
    progress.step("all", 0)
    assert reported == [(0, "all"), (0, "parse"), (1 / 8, "parse"), (1 / 8, "parse"), (3 / 16, "parse"), (1 / 4, "all")]


def attention_in(folder: Path, signature: Signature, target: str = "sm89") -> AttentionPlan:
    """How attention runs in the engine for a target."""
    model = append_graph(folder, signature, RECIPE.shapes.capacity)
    engine = build(open_library("tensorrt-rtx"), model, folder, signature, replace(RECIPE, target=target))
    assert engine.plan.nbytes > 100_000
    assert engine.activation > 0
    return engine.attention


@pytest.mark.parametrize(
    ("attending", "expected"),
    [
        (Attending("float16", head_dim=64, layers=2), AttentionPlan(0, "")),
        (Attending("bfloat16", head_dim=64), AttentionPlan(0, "")),
        (Attending("float32", layers=2), AttentionPlan(2, "TensorRT has no fused kernel for float32")),
        (Attending(head_dim=8), AttentionPlan(1, "TensorRT has no fused kernel for heads of 8")),
        (Attending(head_dim=264), AttentionPlan(1, "TensorRT has no fused kernel for heads of 264")),
        (Attending(head_dim=12), AttentionPlan(1, "TensorRT has no fused kernel for heads of 12", in_graph=True)),
        (
            Attending("float32", head_dim=12, softcap=5.0),
            AttentionPlan(1, "TensorRT has no fused kernel with softcap", in_graph=True),
        ),
    ],
    ids=str,
)
def test_attention_is_fused_where_a_kernel_exists_and_matmuls_elsewhere(
    attending: Attending, expected: AttentionPlan, tmp_path: Path
) -> None:
    manifest = attending.write(tmp_path / "bundle")
    assert attention_in(tmp_path / "bundle", manifest.signature) == expected


def test_attention_is_decomposed_if_the_library_lacks_the_expected_kernel(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another version may support fewer head sizes."""
    monkeypatch.setattr(to_tensorrt, "_FUSED_HEADS", range(8, 257, 8))
    attending = Attending(head_dim=8, layers=2)
    attending.write(tmp_path / "bundle")
    assert attention_of(attending.model(), attending.signature) == AttentionPlan(0, "")
    found = attention_in(tmp_path / "bundle", attending.signature)
    assert found == AttentionPlan(2, f"{library.name} has no fused kernel for it")


def test_the_build_reports_attention_that_is_not_fused(tmp_path: Path, capfd: Capture) -> None:
    folder = tmp_path / "bundle"
    Attending(softcap=5.0).write(folder)
    assert run(["build", str(folder), "--target", "sm89"]) == OK
    assert capfd.readouterr().out.splitlines()[0] == (
        "attention of 1 layer is decomposed into MatMul and Softmax: TensorRT has no fused kernel with softcap"
    )
    (record,) = open_bundle(folder).manifest.engines.values()
    assert record.decomposed == 1
    assert run(["build", str(folder), "--target", "sm89"]) == OK
    assert "TensorRT has no fused kernel with softcap" in capfd.readouterr().out, "also for an existing engine"
    assert run(["inspect", str(folder)]) == OK
    assert "1 layer decomposed" in capfd.readouterr().out


def test_engines_compute_in_float32_with_memory_from_the_runtime(library: Library) -> None:
    trt = library.module
    config = to_tensorrt._config(library, trt.Builder(logger_of(trt)), RECIPE)
    assert not config.get_flag(trt.BuilderFlag.TF32)
    assert config.get_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)


OLDER = r"--target is {}: {} needs {} or newer; .* exported in another format than {} \(--format\)"


@pytest.mark.parametrize(
    ("name", "target", "older", "message"),
    [
        ("float16", "sm89", None, ""),
        ("float16-float8", "sm89", "sm80", OLDER.format("sm80", "float8", "sm89", "float16-float8")),
        ("bfloat16-int4", "sm80", "sm75", OLDER.format("sm75", "bfloat16", "sm80", "bfloat16-int4")),
        pytest.param("bfloat16", "sm80", None, "", marks=pytest.mark.nightly),
        pytest.param("float16-int4", "sm80", None, "", marks=pytest.mark.nightly),
    ],
)
def test_bundles_are_built_for_gpus_that_support_their_types(
    name: str, target: str, older: str | None, message: str, tmp_path: Path, capfd: Capture
) -> None:
    bundle = bundle_of(TINY, ExportOptions(FORMATS[name], "append"))
    assert attention_in(bundle, read_manifest(bundle).signature, target).decomposed == 0
    if older is not None:  # no engine is built, also not for the target that has the type
        folder = shutil.copytree(bundle, tmp_path / "bundle")
        assert run(["build", str(folder), "--target", f"{target},{older}"]) == USAGE
        (line,) = capfd.readouterr().err.splitlines()
        assert re.search(message, line)
        assert not open_bundle(folder).manifest.engines


# head size 64, as in most large models
WIDE = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "sliding_window": 16}


@pytest.mark.nightly
@pytest.mark.parametrize("target", ["sm80", "sm89"])
@pytest.mark.parametrize(
    "family",
    [*(family for family in FAMILIES if "append" in family.lowerings), Family("mistral, wide heads", "mistral", WIDE)],
    ids=lambda family: family.name,
)
def test_an_engine_of_a_familys_graph_is_built(family: Family, target: str, tmp_path: Path) -> None:
    """In half precision, with one layer, unless layers differ."""
    if not {"layer_types", "max_window_layers", "n_layer", "attn_logit_softcapping"} & set(family.options):
        family = replace(family, options={**family.options, "num_hidden_layers": 1})
    decoder, _ = decoder_of(
        families.build(family, torch.float16), "append", "operator" if family.replaceable else "plain"
    )
    to_onnx(decoder, tmp_path)
    attention = attention_in(tmp_path, decoder.signature, target)
    fused = decoder.signature.head_dim >= 16 and family.structure not in ("eager", "softcap")
    assert attention.decomposed == (0 if fused else decoder.signature.layers)
    assert attention.in_graph == (family.structure == "softcap")
