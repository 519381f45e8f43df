"""Products: formats are computed by the right kernels, exactly where that is promised, and other CPUs are refused."""

from __future__ import annotations

import os
import platform
from itertools import count
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from spaceport.runtime.backends import on_onnxruntime, products
from spaceport.runtime.backends.machine import instruction_sets
from spaceport.runtime.backends.products import (
    EXACT_SETTING,
    INPUTS,
    OUTPUTS,
    PRODUCTS,
    ROWS,
    WEIGHT,
    Product,
    ProductCost,
    measure_products,
    open_product,
)
from spaceport.runtime.bundle import BundleError
from spaceport.runtime.session import Runtime


def test_all_formats_are_timed_and_their_rows_compared() -> None:
    ticks = count()
    found = measure_products(clock=lambda: float(next(ticks)))
    assert [cost.format for cost in found] == ["float32", "float16", "int8", "int8, one limb", "int4"]
    assert {cost.milliseconds for cost in found} == {(1e3,) * len(ROWS)}
    # blocks of 16 and integer products are bit-identical on every x86 CPU so far
    assert {cost.format for cost in found if cost.noise} <= {"float32", "float16"}
    assert [ProductCost("a", (), noise).rows for noise in (0.0, 3.21e-7)] == ["bit-identical", "change by 3e-07"]


@pytest.mark.parametrize("product", PRODUCTS, ids=lambda product: product.format)
def test_a_product_is_that_of_its_weights(product: Product) -> None:
    session = open_product(product, np.random.default_rng(0), inputs=64, outputs=32)
    zeros = np.full((3, 64), 128 if product.dtype is np.uint8 else 0, product.dtype)
    (found,) = session.run(None, {"a": zeros})
    assert found.shape == (3, 32)
    assert not found.any()


def has_vnni() -> bool | None:
    """Whether the CPU's flags name 8-bit dot products; None if they do not describe the CPU that kernels see."""
    if "LD_PRELOAD" in os.environ or platform.machine() != "x86_64":
        return None
    return not {"avx512_vnni", "avx_vnni"}.isdisjoint(instruction_sets())


def exact_setting(options: ort.SessionOptions) -> bool:
    """Whether session options choose the kernels that are exact everywhere."""
    try:
        return bool(options.get_session_config_entry(EXACT_SETTING[0]) == EXACT_SETTING[1])
    except RuntimeError:
        return False


def test_products_of_int8_bundles_are_exact_here() -> None:
    """The usual kernels are exact on CPUs with VNNI; on others, sessions have the setting with which they are."""
    exact = products.is_exact(setting=False)
    options = products.session_options(1, "int8", "int8x2")
    content = products._largest_products()
    session = ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    assert has_vnni() is exact or has_vnni() is None
    assert exact_setting(options) is not exact
    for rows in (1, 2, 9, 33):
        (found,) = session.run(None, {"a": np.full((rows, INPUTS), 255, np.uint8)})
        assert found.tolist() == [[255.0 * WEIGHT * INPUTS] * OUTPUTS] * rows


@pytest.mark.parametrize("usual", [True, False])
def test_the_slower_kernels_are_exact_too_and_chosen_only_where_the_usual_ones_are_not(
    usual: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert products.is_exact(setting=True)
    monkeypatch.setattr(products, "is_exact", lambda setting: usual or setting)
    assert exact_setting(products.session_options(1, "int8", "int8x2")) is not usual


def test_products_that_are_cut_off_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Saturating:
        def __init__(self, *given: object, **named: object) -> None: ...

        def run(self, outputs: None, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
            exact = np.full((len(feeds["a"]), OUTPUTS), 255.0 * WEIGHT * INPUTS, np.float32)
            return [np.minimum(exact, 32767.0 * INPUTS / 2)]

    products.is_exact.cache_clear()
    monkeypatch.setattr(products.ort, "InferenceSession", Saturating)
    assert not products.is_exact(setting=False)
    products.is_exact.cache_clear()


def test_a_bundle_is_refused_where_products_are_not_exact(
    tiny_int8_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_onnxruntime, "is_exact", lambda setting: False)
    with pytest.raises(BundleError, match=r"cuts sums of 8-bit products off on this CPU.*--weights int4"):
        Runtime.open(tiny_int8_bundle)
