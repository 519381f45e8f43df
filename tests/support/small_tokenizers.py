"""Small tokenizers: one of each kind, byte-level and byte-fallback, with helpers for expected text, and varied texts."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from spaceport.runtime.sampling.grammar import Vocabulary, open_vocabulary
from support.hash_engine import CHILD, END, FORK, MASKS, VOCAB

BROKEN = "\ufffd"
SPECIAL = ["<s>", "</s>"]
CORPUS = [
    "the answer of the tower is the ship, and the ship is the answer",
    "你好世界，你们好 你 世界你好 こんにちは世界",
    "😀😁😂 👍🏽👍🏾 👨‍👩‍👧 é é naïve שלום עולם مرحبا",
    "abab\nabab\nabab\nabab 你ab a你b\n\n  def f(x):\n\treturn x\n",
]


def byte_level() -> Tokenizer:
    """A byte-level tokenizer as in GPT and Llama 3: tokens are bytes, often parts of characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=sorted(alphabet), special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """A byte-fallback tokenizer as in Llama 2: tokens are characters and words; others become bytes."""
    words = ["▁", *"abcdefghinorstw.,你é", "th", "the", "▁the", "▁a", "▁▁", "ab", "\n"]
    vocab = {token: i for i, token in enumerate(("<unk>", *SPECIAL))}
    vocab |= {f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)}
    vocab |= {word: len(vocab) + i for i, word in enumerate(words)}
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "a"), ("▁", "▁"), ("a", "b")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.add_special_tokens(["<unk>", *SPECIAL])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def small_vocabulary() -> tuple[Tokenizer, Vocabulary]:
    """A tokenizer for the tokens of the fake engine, and its vocabulary."""
    texts = ["a", "b", "c", "ab", "bc", "ca", "cab", "Ġ", "ÃĤ", "©"]
    names = [*texts, "</s>", "[M1]", "[M2]", "[Fork]", "[Child]"]
    tokenizer = Tokenizer(models.BPE({name: token for token, name in enumerate(names)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(names[len(texts) :])
    assert tokenizer.get_vocab_size() == VOCAB
    return tokenizer, open_vocabulary(tokenizer, VOCAB, (END,), (*MASKS, FORK, CHILD))


BYTES = byte_level()
FALLBACK = byte_fallback()


def full(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True))


def one_byte_each(text: str) -> list[int]:
    """The tokens of a text without merges: one for each byte."""
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    ids = BYTES.get_vocab()
    return [ids[letter] for word, _ in letters for letter in word]


def cut_at(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The text before the stop string that ends first, searched character by character."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


_PARTS = (
    *("a", "b", "ab", "the ", "ana", "It's ", "'S", "Pandas", " Panda", "philosophy ", "import ", "def f(x):\n    "),
    *("  ", "\r\n", *" \n\t\u3000\xa0\u2028\u200b\x85\ufeff\u0301\u0338\u212a"),
    *("1", "23", "2024-11-23", "=", "==", "-", "--", "{", "}", "(", ")", "<", "|", ">", "▁", "😀", "👨‍👩‍👧", "👍🏽"),
    *("你好", "世界，", "。", "привет ", "Ж", "العربية", "가", "각", "ᄀ", "ᅡ", "é", "e\u0301", "ü", "ſ", "ﬁ", "①", "İ"),
)
_RANGES = ((32, 127), (32, 0x3000), (0x4E00, 0x9FFF), (0x1F300, 0x1F700))  # of code points, without surrogates


def varied_texts(count: int, parts: Sequence[str] = ()) -> list[str]:
    """This many texts; some have the given parts, such as special tokens."""
    dice = random.Random(count)
    all_parts = (*_PARTS, *parts, *parts)

    def text() -> str:
        kind = dice.randrange(4)
        if kind == 0:
            return "".join(dice.choice(all_parts) for _ in range(dice.randrange(30)))
        if kind == 1:
            return "".join(chr(dice.randrange(*dice.choice(_RANGES))) for _ in range(dice.randrange(40)))
        if kind == 2:
            return "".join(dice.choice("a-= \n01") * dice.randrange(1, 30) for _ in range(dice.randrange(6)))
        return "".join(dice.choice("aab nl") for _ in range(dice.randrange(60)))

    return [text() for _ in range(count)]
