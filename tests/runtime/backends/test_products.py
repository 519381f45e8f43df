"""Products: each bundle format's product is computed with the right kernel, and rows that depend on others are found."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest

from spaceport.runtime.backends.products import PRODUCTS, ROWS, Cost, Product, measure, noise, open_product


def test_all_formats_are_timed_and_their_rows_compared() -> None:
    ticks = count()
    found = measure(clock=lambda: float(next(ticks)))
    assert [cost.format for cost in found] == ["float32", "float16", "int8", "int8, one limb", "int4"]
    assert {cost.milliseconds for cost in found} == {(1e3,) * len(ROWS)}
    # blocks of 16 and integer products are bit-identical on every x86 CPU so far
    assert {cost.format for cost in found if cost.noise} <= {"float32", "float16"}


def test_the_guarantee_of_a_product_is_put_into_words() -> None:
    assert Cost("a", (), 0.0).rows == "bit-identical"
    assert Cost("a", (), 3.21e-7).rows == "change by 3e-07"


@pytest.mark.parametrize("product", PRODUCTS, ids=lambda product: product.format)
def test_a_product_is_that_of_its_weights(product: Product) -> None:
    session = open_product(product, np.random.default_rng(0), inputs=64, outputs=32)
    zeros = np.full((3, 64), 128 if product.dtype is np.uint8 else 0, product.dtype)
    (found,) = session.run(None, {"a": zeros})
    assert found.shape == (3, 32)
    assert not found.any()


@pytest.mark.parametrize("width", [2, 9, 33])
def test_a_product_whose_rows_depend_on_their_number_is_noticed(width: int) -> None:
    class Session:
        def run(self, outputs: None, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
            (rows,) = feeds.values()
            return [rows * np.float32(1 + 1e-6 * (len(rows) >= width))]

    rows = np.random.default_rng(0).standard_normal((36, 8), np.float32)
    assert noise(Session(), rows) == pytest.approx(1e-6, rel=0.2)  # type: ignore[arg-type]
