"""Varied texts: seeded strings of many scripts, with whitespace, digits, emoji, runs and combining characters."""

from __future__ import annotations

import random
from collections.abc import Sequence

_PARTS = (
    *("a", "b", "ab", "the ", "ana", "It's ", "'S", "Pandas", " Panda", "philosophy ", "import ", "def f(x):\n    "),
    *(
        " ",
        "  ",
        "\n",
        "\t",
        "\r\n",
        "\u3000",
        "\xa0",
        "\u2028",
        "\u200b",
        "\x85",
        "\ufeff",
        "\u0301",
        "\u0338",
        "\u212a",
    ),
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
