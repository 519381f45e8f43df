"""Steps of a small native model: threads and instruction sets change no bit of its logits, in any rows and slots."""

from pathlib import Path

import pytest

from support.families import VOCAB
from support.layouts import Layout, fed
from support.native_models import NativeFiles, NativeModel, built, tokens
from support.native_operators import available_sets, forced, library

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler")

TEXT = tokens(40, VOCAB)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> NativeFiles:
    folder: Path = tmp_path_factory.mktemp("decoder")
    return NativeModel.of(built("qwen2")).write(folder, "int4")


@pytest.mark.parametrize("threads", [1, 2])
def test_logits_are_equal_in_any_groups_and_slots_on_all_sets(files: NativeFiles, threads: int) -> None:
    found = set()
    for set_name in available_sets():
        with forced(set_name):
            engine = files.engine(threads=threads)
        for widths in ((len(TEXT),), (1,), (9, 1, 6, 2, 12, 3, 5, 2)):
            found |= {fed(engine, TEXT, Layout(widths, seed=seed)).tobytes() for seed in (None, 1)}
    assert len(found) == 1
