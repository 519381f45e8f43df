"""Integer matmuls: graphs with int8 activations quantize each row by itself, like the PyTorch reference."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM

from spaceport.exporter.checkpoint import TokenFlags, open_checkpoint
from spaceport.exporter.export import ExportOptions, exact_activations, export, kv_cache_of
from spaceport.exporter.integer_matmuls import store_integer_matmuls
from spaceport.exporter.quantized_weights import WeightNotFound, stored_weights
from spaceport.graphs.contract.exactness import tolerance_of
from spaceport.graphs.contract.faults import InputFault, OptionFault
from spaceport.graphs.contract.manifest import MODEL_FILE
from spaceport.graphs.contract.signature import Activations, Lowering, Precision, Weights, visible_length
from spaceport.graphs.quantization import BLOCKS, Quantization, QuantizedWeight, fake_quantize, unclipped_format
from spaceport.graphs.quantize import quantize_model
from spaceport.runtime.backends.on_onnxruntime import OnnxRuntimeEngine, open_session
from spaceport.runtime.backends.products import session_options
from spaceport.runtime.bundle import Bundle, open_bundle
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.engine import Batch, Engine
from spaceport.runtime.session import Runtime
from spaceport.tools.cli import INPUT, USAGE, run
from spaceport.tools.reference import open_reference, stored_in
from spaceport.tools.verify.audit import audit
from spaceport.tools.verify.prompts import TokenizedPrompt
from support.cache import built
from support.exported import bundle_of
from support.families import build, family_of
from support.paths import TINY
from support.small_bundle import edit, fill, new_bundle
from support.small_graphs import Array, Sizes, changed, model_of, op, operators, outputs_of

Products = Mapping[str, QuantizedWeight]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def product(seed: int, inputs: int, outputs: int) -> QuantizedWeight:
    weight = torch.randn(outputs, inputs, generator=seeded(seed))
    return unclipped_format("int8", torch.float32).nearest(weight)


def stored(products: Products, shape: Sizes, limbs: int, inputs: Mapping[str, str]) -> onnx.ModelProto:
    """A graph with an int8 matmul and an output for each layer, on the input with the given name."""
    nodes = [op("MatMul", [inputs[name], f"{name}.weight"], [f"{name}.out"]) for name in products]
    outputs = {f"{name}.out": [*shape, product.codes.shape[1]] for name, product in products.items()}
    given = {inputs[name]: [*shape, product.codes.shape[0]] for name, product in products.items()}
    weights = {f"{name}.weight": product.dequantized.numpy() for name, product in products.items()}
    return integers(model_of(nodes, given, outputs, weights), Quantization("int8", products, limbs))


def integers(plain: onnx.ModelProto, products: Quantization) -> onnx.ModelProto:
    """The graph with integer products, which are operators of ONNX Runtime."""
    return changed(plain, lambda model: store_integer_matmuls(model, products), check=False)[1]


def expected_of(product: QuantizedWeight, states: Tensor, limbs: int) -> Array:
    values: Array = (fake_quantize(states, limbs) @ product.dequantized).numpy()
    return values


def compare(products: Products, shape: tuple[int, ...], limbs: int, inputs: Mapping[str, str]) -> None:
    """Compare each matmul with the reference; row sizes differ by factors of 1000, so that dynamic scales matter."""
    widths = {inputs[name]: product.codes.shape[0] for name, product in products.items()}
    sizes = torch.logspace(-2, 1, shape[-1])[:, None]
    states = {name: torch.randn((*shape, size), generator=seeded(9)) * sizes for name, size in widths.items()}
    model = stored(products, ["B", "T"][-len(shape) :], limbs, inputs)
    arrays = {name: values.numpy() for name, values in states.items()}
    found = outputs_of(model, arrays, session_options(1, "int8", "int8x2"))
    for got, (name, product) in zip(found, products.items(), strict=True):
        expected = expected_of(product, states[inputs[name]], limbs)
        for row, other in zip(got.reshape(-1, got.shape[-1]), expected.reshape(-1, got.shape[-1]), strict=True):
            # values between two steps of the low limb may be rounded up or down
            assert np.abs(row - other).max() <= 2e-4 * np.abs(other).max()


@pytest.mark.parametrize("limbs", [1, 2])
@pytest.mark.parametrize("shape", [(7,), (3, 7)])
def test_int8_matmuls_equal_matmuls_of_the_dequantized_values(shape: tuple[int, ...], limbs: int) -> None:
    """Two layers of different sizes that share their input, and one with its own input."""
    products = {"a.query": product(1, 24, 40), "a.key": product(2, 24, 9), "b.down": product(3, 16, 8)}
    compare(products, shape, limbs, {"a.query": "states", "a.key": "states", "b.down": "others"})


def test_only_modules_of_one_parent_are_fused() -> None:
    products = {"a.query": product(1, 24, 40), "a.key": product(2, 24, 9), "b.head": product(3, 24, 8)}
    model = stored(products, ["T"], 1, dict.fromkeys(products, "x"))
    assert operators(model).count("MatMulIntegerToFloat") == 2


def test_wide_inputs_and_equal_weights_of_repeated_layers() -> None:
    compare({name: product(seed, 16400, 4) for seed, name in enumerate(("a", "b"))}, (3,), 2, {"a": "x", "b": "y"})
    equal = product(1, 16, 8)
    compare({"0": equal, "1": equal}, (3,), 2, {"0": "a", "1": "b"})
    nodes = [op("MatMul", ["x", f"w{name}"], [f"y{name}"]) for name in range(3)]
    constants = {f"w{name}": equal.dequantized.numpy() for name in range(3)}
    plain = model_of(nodes, {"x": ["T", 16]}, {f"y{name}": ["T", 8] for name in range(3)}, constants)
    with pytest.raises(WeightNotFound, match="more matmuls with the weight of 0 than there are modules with this"):
        integers(plain, Quantization("int8", {"0": equal, "1": equal}, 2))


def test_a_row_of_zeros_has_an_output_of_zeros() -> None:
    states = torch.randn(3, 16, generator=seeded(9))
    states[1] = 0
    for limbs in (1, 2):
        model = stored({"a": product(1, 16, 8)}, ["T"], limbs, {"a": "x"})
        (found,) = outputs_of(model, {"x": states.numpy()}, session_options(1, "int8", "int8x2"))
        assert not found[1].any()
        assert found[0].all()


SLOTS, LAYERS = 256, 3
Tokens = NDArray[np.int64]
Capture = pytest.CaptureFixture[str]


def exported(activations: Activations = "int8", lowering: Lowering = "scatter", weights: Weights = "int8") -> Path:
    return bundle_of(TINY, ExportOptions(lowering, weights=weights, requested_activations=activations))


def engine_of(bundle: Bundle) -> OnnxRuntimeEngine:
    options = session_options(1, bundle.manifest.weights, bundle.manifest.activations)
    session = open_session(bundle, options, ["CPUExecutionProvider"])
    return OnnxRuntimeEngine(session, bundle.manifest.signature, SLOTS, 3)


def fed(engine: Engine, ids: Tokens, widths: Sequence[int], beside: int = 0, ahead: int = 0) -> Array:
    """The logits of a text fed in steps of these widths, with `beside` other requests and `ahead` more visible slots."""
    found, start = [], 0
    texts = np.concatenate((ids[None], np.random.default_rng(5).integers(3, 600, (beside, ids.size))))
    for width in widths:
        rows = np.arange(start, start + width)
        mask = np.arange(visible_length(start + width + ahead))[None, :] <= rows[:, None]
        every = [np.repeat(each[None], beside + 1, 0) for each in (rows, rows, mask[None], np.arange(width))]
        found.append(engine.run(Batch(0, texts[:, rows].copy(), *every))[0].copy())
        start += width
    return np.concatenate(found)


@pytest.fixture(scope="module")
def text() -> Tokens:
    return np.random.default_rng(1).integers(3, 600, 140)


PROMPT = 40  # rows that are fed at once; the visible length grows at 64 and 128
ALONE = [PROMPT, *[1] * 100]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weights", "activations"),
    [("int4", "int8"), pytest.param("int8", "int8x2", marks=pytest.mark.nightly)],
)
def test_rows_are_bit_identical_alone_with_other_rows_and_with_other_requests(
    text: Tokens, weights: Weights, activations: Activations
) -> None:
    engine = engine_of(open_bundle(exported(activations, weights=weights)))
    alone = fed(engine, text, ALONE)
    for widths in ([36, 36, 28], [9] * 11 + [1], [4] * 25, [1, 2] * 33 + [1]):
        for beside, ahead in ((0, 0), (2, 0), (0, 64)):  # more slots are visible with mask slots, or other requests
            np.testing.assert_array_equal(fed(engine, text, [PROMPT, *widths], beside, ahead), alone)


def test_rows_of_an_append_bundle_are_bit_identical_one_by_one_and_in_one_call(text: Tokens) -> None:
    """With ONNX Runtime's Attention operator they were not: at position 18 on a Zen 5."""
    engine = engine_of(open_bundle(exported(lowering="append")))
    np.testing.assert_array_equal(fed(engine, text, [1] * text.size), fed(engine, text, [text.size]))


@pytest.mark.parametrize(
    ("lowering", "activations"),
    [
        ("scatter", "int8"),
        *(pytest.param(*kind, marks=pytest.mark.nightly) for kind in (("scatter", "int8x2"), ("append", "int8"))),
    ],
)
def test_the_reference_quantizes_as_the_graph_does(text: Tokens, lowering: Lowering, activations: Activations) -> None:
    bundle = open_bundle(exported(activations, lowering))
    expected = fed(open_reference(bundle, TINY, SLOTS, 3), text, [PROMPT, 100])
    error = np.abs(fed(engine_of(bundle), text, [PROMPT, 100]) - expected).max()
    assert error <= tolerance_of("float32", activations) * max(1.0, np.abs(expected).max())


def test_all_matmuls_with_weights_are_int8_and_their_inputs_are_quantized_once() -> None:
    graph = onnx.load(str(exported() / MODEL_FILE), load_external_data=False).graph
    kinds = Counter(node.op_type for node in graph.node)
    # query, key and value; output; gate and up; down; and the head
    assert kinds["MatMulIntegerToFloat"] == 4 * LAYERS + 1
    # and queries, keys and values of each layer
    assert kinds["QuantizeLinear"] == kinds["MatMulIntegerToFloat"] + 3 * LAYERS
    assert kinds["MatMulInteger"] == 2 * LAYERS
    large = [value for value in graph.initializer if np.prod(value.dims) > 4096]
    floats = [value.name for value in large if value.data_type != onnx.TensorProto.INT8]
    assert floats == ["model.lm_head.input_rotation"]  # the gain of the last norm, before the rotated embeddings


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--calibration-data", "{prompts}", "--activations", "float"], USAGE, "expected --weights int4 with it"),
        (["--calibration-data", "{missing}"], INPUT, "expected a prompt file with one prompt per line"),
        (["--kv-cache", "int8", "--activations", "float"], USAGE, "expected weights int8 with int8 activations"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    tmp_path: Path, capfd: Capture, flags: list[str], code: int, message: str
) -> None:
    (tmp_path / "prompts.txt").write_text("import json\n", "utf-8")
    named = {"prompts": str(tmp_path / "prompts.txt"), "missing": str(tmp_path / "missing.txt")}
    given = [flag.format(**named) for flag in flags]
    assert run(["export", str(TINY), str(tmp_path / "bundle"), "--weights", "int8", *given]) == code
    assert message in " ".join(capfd.readouterr().err.split())
    assert not (tmp_path / "bundle").exists()


def test_an_int8_bundle_is_not_built_for_a_gpu(tmp_path: Path, capfd: Capture) -> None:
    bundle = new_bundle(tmp_path / "bundle")
    edit(bundle, lambda entries: entries.update(weights="int8", activations="int8x2"))
    edit(bundle, lambda entries: entries["signature"].update(lowering="append"))
    assert run(["build", str(bundle), "--target", "sm89"]) == INPUT
    assert "products are of 8-bit integers, which TensorRT does not have" in " ".join(capfd.readouterr().err.split())


@pytest.mark.parametrize("activations", ["int8", "int8x2"])
def test_the_codes_in_a_graph_are_those_that_were_written(activations: Activations) -> None:
    bundle = open_bundle(exported(activations))
    found = stored_in(bundle)
    assert found is not None
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    expected = quantize_model(model, "int8", activations, "scatter", found)
    assert {*found.layers, "lm_head"} == {*expected.layers}
    # a checkpoint that is rounded again to the nearest codes is close to those of GPTQ
    weight = model.get_submodule("model.layers.0.self_attn.k_proj").weight
    assert torch.equal(weight, found.layers["model.layers.0.self_attn.k_proj"].dequantized.T)


@pytest.mark.parametrize(("lowering", "dtype"), [("scatter", "float32"), ("append", "bfloat16")])
def test_int4_codes_in_a_graph_are_those_that_were_written(lowering: Lowering, dtype: Precision) -> None:
    options = ExportOptions(lowering, dtype, "int4", requested_activations="float")
    found = stored_in(open_bundle(bundle_of(TINY, options)))
    assert found is not None
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=getattr(torch, dtype))
    again = quantize_model(model, "int4", "float", lowering, found)
    assert again.layers.keys() == found.layers.keys()
    assert all(0.01 < error < 0.2 for error in again.errors.values())
    layer = found.layers["model.layers.0.self_attn.k_proj"]
    assert layer.block == BLOCKS[lowering][-1]
    assert torch.equal(model.get_submodule("model.layers.0.self_attn.k_proj").weight, layer.dequantized.T)


def test_a_graph_that_does_not_describe_its_weights_is_refused(tmp_path: Path) -> None:
    fill(tmp_path)
    edit(tmp_path, lambda entries: entries.update(weights="int8", activations="int8x2"))
    with pytest.raises(InputFault, match=r"DecodeError .* where the graph describes its int8 weights: expected one"):
        stored_in(open_bundle(tmp_path))
    with pytest.raises(InputFault, match=r"KeyError 'spaceport\.int8' where the graph describes its int8 weights: exp"):
        stored_weights(onnx.ModelProto(ir_version=11).SerializeToString(), tmp_path, "int8", 1)


PROMPTS: dict[str, str] = json.loads((TINY / "prompts.json").read_text("utf-8"))


def test_an_int8_activation_bundle_is_lossless_without_noise() -> None:
    with Runtime.open(exported("int8", weights="int4"), max_seq_len=256, max_requests=3) as runtime:
        prompts = [TokenizedPrompt(1, tuple(runtime.tokens_of(text))) for text in PROMPTS.values()]
        report = audit(runtime, prompts, 24)
    assert report.summary.startswith("lossless")
    assert {one.largest for one in report.noise} == {0.0}
    assert all(row.identical == row.completions for row in report.drafted)
    assert {row.mode for row in report.modes} == {
        *("plain", "plain, sampled", "chain k = 5", "chain k = 1", "chain with lookup", "chain with lookup, sampled")
    }
    assert report.engine.endswith("scatter, drafts as chains")


def test_its_drafts_are_chains_unless_trees_are_requested() -> None:
    with Runtime.open(exported("int8", weights="int4"), max_seq_len=256, step_costs="free") as runtime:
        assert (runtime.exactness.drafts, runtime.exactness.parallel_threads) == ("chain", False)
        manifest, exactness = runtime.bundle.manifest, runtime.exactness
        assert Decoding().draft_config(manifest.drafts, exactness.drafts).siblings == 1
        assert Decoding(draft_siblings=3).draft_config(manifest.drafts, exactness.drafts).siblings == 3
        (prompt, *_) = PROMPTS.values()
        drafted = runtime.generate(prompt, Decoding(max_tokens=48, trace=True))
        assert drafted.tokens == runtime.generate(prompt, Decoding(max_tokens=48, mask_slots=0)).tokens
        assert drafted.statistics.steps < 48


@pytest.mark.nightly
@pytest.mark.parametrize("block", [32, 64])
def test_blocks_whose_rows_depend_on_the_call_are_recognized_and_draft_nothing(
    block: int, text: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which blocks these are depends on the CPU: 32 without AVX512, 64 on all of them so far."""
    monkeypatch.setitem(BLOCKS, "scatter", (block, 32, 16))
    options = ExportOptions("scatter", weights="int4", requested_activations="int8")
    bundle = built("bundle-blocks", (block, TINY), ["exporter/export.py"], lambda target: export(TINY, target, options))
    with Runtime.open(bundle, max_seq_len=256, step_costs="free") as runtime:
        chains = fed(runtime.engine, text, [PROMPT, *[9] * 11, 1])
        differs = not np.array_equal(chains, fed(runtime.engine, text, ALONE))
        assert (runtime.exactness.rows > 0) == differs
        assert runtime.exactness.drafts == ("none" if differs else "chain")
        assert ("drafts are off" in " ".join(runtime.notes)) == differs
        assert (runtime.generate("def scan(text):", Decoding(max_tokens=48)).statistics.candidate_rows == 0) == differs


def test_a_model_without_grouped_query_attention_has_other_activations() -> None:
    """For such models ONNX Runtime has another kernel of float attention for one row than for several."""
    config = open_checkpoint(TINY, TokenFlags()).config
    assert exact_activations(config, ExportOptions(weights="int4")).activations == "int8"
    assert exact_activations(config, ExportOptions(weights="int8")).activations == "int8"
    config.num_key_value_heads = config.num_attention_heads
    assert exact_activations(config, ExportOptions(weights="int4")).activations == "float"
    assert exact_activations(config, ExportOptions(weights="int8")).activations == "int8"
    floats = ExportOptions(weights="int8", requested_kv_cache="same")
    assert exact_activations(config, floats).activations == "int8x2"
    with pytest.raises(OptionFault, match="6 query heads and as many KV heads, and drafts would not be exact"):
        exact_activations(config, ExportOptions(weights="int4", requested_activations="int8"))
    with pytest.raises(OptionFault, match=r"drafts would not be exact; expected int8x2 \(--activations\)"):
        exact_activations(config, replace(floats, requested_activations="int8"))


def test_keys_and_values_of_attention_that_cannot_be_replaced_are_floats() -> None:
    replaceable, other = build(family_of("phi")), build(family_of("falcon, 7B style"))
    options = ExportOptions(weights="int8")
    assert (kv_cache_of(replaceable, options), kv_cache_of(other, options)) == ("int8", "same")
    assert kv_cache_of(replaceable, replace(options, requested_activations="int8x2")) == "int8"
    assert kv_cache_of(replaceable, replace(options, requested_activations="float")) == "same"
    assert kv_cache_of(replaceable, replace(options, requested_kv_cache="same")) == "same"
    with pytest.raises(OptionFault, match=r"attention of FalconForCausalLM cannot be replaced.* expected same"):
        kv_cache_of(other, replace(options, requested_kv_cache="int8"))


def test_a_model_that_cannot_be_rotated_has_two_limbs() -> None:
    config = build(family_of("gemma2")).config
    assert exact_activations(config, ExportOptions(weights="int8")).activations == "int8x2"
    with pytest.raises(OptionFault, match=r"gemma2 model cannot be rotated, and loses accuracy .* expected int8x2"):
        exact_activations(config, ExportOptions(weights="int8", requested_activations="int8"))
