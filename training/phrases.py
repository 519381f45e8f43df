"""Phrases: count which token follows which in the answers of samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spaceport.exporter.checkpoint import Checkpoint, load_tokenizer
from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.contract.phrases import CHANCES, LONGEST, PhraseTable, extended_all
from spaceport.graphs.mechanism import Phrases
from spaceport.training.conversations import read_conversations
from spaceport.training.samples import Prepared, Sample, conversation_encoder, prepare_files
from spaceport.training.settings import DEFAULT_PHRASES

_FEWEST = 2  # times that a context has to occur
_LEAST = 0.2  # probability of a token that is worth an entry
_ALIKE = 0.15  # difference in probability to that of a shorter context with the same token that is not worth an entry
_ANY_LENGTH = 1 << 30  # tokens

# Contexts, the same without their first token, and the tokens behind them.
_Followed = tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.int64]]


class _Counted(NamedTuple):
    """Contexts of one length, ascending, with the best token behind each."""

    contexts: NDArray[np.uint64]
    shorter: NDArray[np.uint64]  # the context without its first token
    tokens: NDArray[np.int64]
    counts: NDArray[np.int64]  # of the token
    chances: NDArray[np.float64]


def read_phrases_of(checkpoint: Checkpoint, files: Sequence[Path]) -> Phrases:
    """The phrases in the answers of conversations, by the tokens of a checkpoint."""
    encoder = conversation_encoder(load_tokenizer(checkpoint), checkpoint.tokens)
    samples = prepare_files({file: read_conversations(file) for file in files}, encoder, _ANY_LENGTH)
    found = phrases_of(samples, DEFAULT_PHRASES)
    if found is None:
        raise InputFault(
            f"{files[0]}: no phrase occurs {_FEWEST} times in its answers: expected more or longer answers"
        )
    return found


def phrases_of(prepared: Prepared, most: int) -> Phrases | None:
    """The phrases of samples, at most so many; None without any."""
    table = count_phrases((*prepared.unforked, *prepared.whole), most) if most else None
    return Phrases(table) if table is not None and table.contexts.size else None


def count_phrases(samples: Iterable[Sample], most: int) -> PhraseTable:
    """The phrases of samples without forks, those that occur most often: at most `most` contexts."""
    entries: dict[int, tuple[int, int, float]] = {}  # by context: token, count, probability
    expected: dict[int, tuple[int, float]] = {}  # by context, also where a shorter one is enough
    for parts in zip(*map(_followed, samples), strict=True):
        columns = (column.tolist() for column in _best(parts))
        for context, shorter, token, count, chance in zip(*columns, strict=True):
            before = expected.get(shorter)
            if chance >= _LEAST:
                expected[context] = token, chance
                if before is None or before[0] != token or abs(before[1] - chance) >= _ALIKE:
                    entries[context] = token, count, chance
            elif before is not None:
                expected[context] = before
    often = sorted(entries, key=lambda context: -entries[context][1])[:most]
    kept = sorted(often)
    return PhraseTable(
        np.array(kept, np.uint64),
        np.array([entries[context][0] for context in kept], np.uint32),
        np.array([round(CHANCES * entries[context][2]) for context in kept], np.uint8),
    )


def _followed(sample: Sample) -> list[_Followed]:
    """By length of the context: contexts, the same without their first token, and the tokens of answers behind them."""
    ids, learned = sample.ids, sample.learned
    contexts, found = np.zeros(ids.size, np.uint64), []  # those that end before each token
    for length in range(1, LONGEST + 1):
        earlier = np.concatenate((np.zeros(min(length, ids.size), np.int64), ids[:-length]))
        shorter, contexts = contexts, extended_all(contexts, earlier)
        wanted = learned.copy()
        wanted[:length] = False
        found.append((contexts[wanted], shorter[wanted], ids[wanted]))
    return found


def _best(parts: Sequence[_Followed]) -> _Counted:
    """The best token behind each context of all samples that occurs often enough."""
    contexts, shorter, tokens = map(np.concatenate, zip(*parts, strict=True))
    order = np.lexsort((tokens, contexts))
    begins = _begins(contexts[order], tokens[order])
    counts = np.diff(begins, append=contexts.size)  # of each token behind a context
    pairs = order[begins]
    by_context = np.lexsort((-counts, contexts[pairs]))
    first = _begins(contexts[pairs[by_context]])
    totals = np.add.reduceat(counts[by_context], first) if first.size else counts
    often = totals >= _FEWEST
    best, totals = by_context[first[often]], totals[often]
    chances = counts[best] / (totals + 1)  # one more: a token that was never seen may follow
    chosen = pairs[best]
    return _Counted(contexts[chosen], shorter[chosen], tokens[chosen], counts[best], chances)


def _begins(*columns: NDArray[np.generic]) -> NDArray[np.int64]:
    """Where equal lines of sorted columns begin."""
    changed = np.ones(columns[0].size, np.bool_)
    changed[1:] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    return np.flatnonzero(changed)
