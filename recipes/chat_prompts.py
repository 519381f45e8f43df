"""Chat prompts: seeded prompts of eight kinds, to which a chat model's own answers become training data.

Templates and words are Spaceport's own (`chat_words.json`); texts to summarize are paragraphs of the documentation that
Python installs with itself (`pydoc_data`, PSF licence). The evaluation prompts in `tools/demo/chat/heldout.jsonl` are
written by hand and share no text with these.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics as python_topics
from typing import Any

Words = dict[str, list[str]]
Turns = list[str]  # user turns; each is answered before the next one

_WORDS = Path(__file__).parent / "chat_words.json"
_PARAGRAPH = range(250, 900)  # characters of a text to summarize
_ATTEMPTS = 50  # per prompt, to find one that is new
_MONTHS = ("January", "March", "April", "May", "July", "August", "October", "November")
_COUNTS = ("three", "five", "six", "seven", "eight", "ten")
_TITLES = (
    "Give each item a short title, a colon and one or two sentences.",
    "Write each item as a bold title, a colon and an explanation.",
    "Number the items; each has a title, a colon and one sentence.",
)
_STYLES = ("", "", "", " Keep it short.", " Be detailed.", " Use simple words.", " Give one example.")


def prompts(count: int, seed: int) -> list[dict[str, object]]:
    """Different prompts, `count` of them, the kinds in turn; the same for the same seed and version of Python."""
    words: Words = json.loads(_WORDS.read_text("utf-8"))
    paragraphs = _paragraphs()
    dice = random.Random(seed)
    seen: set[tuple[str, ...]] = set()
    found: list[dict[str, object]] = []
    for kind in islice(_cycle(list(_KINDS)), count):
        for _ in range(_ATTEMPTS):
            turns = _KINDS[kind](dice, words, paragraphs)
            if kind in _STYLED:
                turns[-1] += dice.choice(_STYLES)
            if tuple(turns) not in seen:
                seen.add(tuple(turns))
                break
        else:
            raise ValueError(f"{count} prompts: no new prompt of kind {kind} in {_ATTEMPTS} attempts: ask for fewer")
        found.append({"kind": kind, "messages": [{"role": "user", "content": turn} for turn in turns]})
    return found


def titled_lists(count: int, seed: int) -> list[dict[str, object]]:
    """Prompts that ask for a list whose items have titles: a model can learn to fork on the answers."""
    dice = random.Random(seed)
    listed = [prompt for prompt in prompts(len(_KINDS) * count, seed) if prompt["kind"] == "lists"]
    return [{**prompt, "messages": _with_suffix(prompt, dice.choice(_TITLES))} for prompt in listed]


def _with_suffix(prompt: dict[str, Any], suffix: str) -> list[dict[str, str]]:
    *before, last = prompt["messages"]
    return [*before, {**last, "content": f"{last['content']} {suffix}"}]


def _cycle(kinds: list[str]) -> Iterator[str]:
    while True:
        yield from kinds


def _paragraphs() -> list[str]:
    """Prose paragraphs of Python's documentation, each in one line."""
    found = []
    for name in sorted(python_topics):
        for block in python_topics[name].split("\n\n"):
            text = re.sub(r"\s+", " ", block).strip()
            if len(text) in _PARAGRAPH and text[0].isupper() and text.endswith(".") and "|" not in text:
                found.append(text)
    return found


def _writing(dice: random.Random, words: Words, paragraphs: list[str]) -> Turns:
    form, topic = dice.choice(words["forms"]), dice.choice(words["topics"])
    person, place, mood = (dice.choice(words[name]) for name in ("people", "places", "moods"))
    return [
        dice.choice(
            (
                f"Write {form} about {topic}.",
                f"Write {form} about {person} and {topic}.",
                f"Write {form} set in {place}. Make it {mood}.",
                f"Describe {place} in one {mood} paragraph.",
                f"Write {form} in which {person} talks about {topic}.",
                f"Write the first paragraph of a {mood} story about {person} in {place}.",
                f"Write a product description for {dice.choice(words['things'])}.",
            )
        )
    ]


def _reasoning(dice: random.Random, words: Words, paragraphs: list[str]) -> Turns:
    a, b, c = dice.randint(2, 9), dice.randint(11, 60), dice.randint(3, 40)
    thing = dice.choice(words["things"]).partition(" ")[2]
    return [
        dice.choice(
            (
                f"Explain {dice.choice(words['facts'])}.",
                f"Explain step by step {dice.choice(words['facts'])}.",
                f"If {a} boxes hold {a * c} {dice.choice(words['topics'])} cards, how many do {b} boxes hold? Show the steps.",
                f"What is {b} times {c}? Explain how you calculate it.",
                f"A {thing} costs {b * a} euros and is reduced by {5 * a} percent. What is the new price? Show the calculation.",
                f"A bus drives {b * a} km in {a} hours. How far does it drive in {a + c} hours at the same speed?",
                f"Is {b * c + 1} divisible by {a}? Explain.",
                f"There are {c} people in a room and {b} chairs. How many chairs stay empty if {a} more people come?",
                f"What are the advantages and disadvantages of {dice.choice(words['topics'])}?",
                f"Compare {dice.choice(words['topics'])} and {dice.choice(words['topics'])}.",
            )
        )
    ]


def _code(dice: random.Random, words: Words, paragraphs: list[str]) -> Turns:
    function, topic = dice.choice(words["functions"]), dice.choice(words["code_topics"])
    return [
        dice.choice(
            (
                f"Write a Python function that {function}.",
                f"Write a Python function that {function}. Add a docstring and an example.",
                f"Write a JavaScript function that {function}.",
                f"Write unit tests for a Python function that {function}.",
                f"Explain {topic} with an example.",
                f"Explain {topic} to a beginner in three short paragraphs.",
                f"What are common mistakes with {topic}?",
                f"Write a short program that shows {topic}.",
                f"When should I use {topic}, and when not?",
            )
        )
    ]


def _extraction(dice: random.Random, words: Words, paragraphs: list[str]) -> Turns:
    task = dice.choice(
        (
            "List all numbers of this text and what they mean.",
            "Return the facts of this text as JSON.",
            "List all dates and times of this text.",
            "Which things are named in this text? Answer with a list.",
            "Answer in one sentence: what is the most important fact of this text?",
            "Fill in a table with two columns, name and value, from this text.",
        )
    )
    return [f"{task}\n\n{_record(dice, words)}"]


def _record(dice: random.Random, words: Words) -> str:
    """A few sentences with made-up facts."""
    thing, other = (each.partition(" ")[2] for each in dice.sample(words["things"], 2))
    day, month = dice.randint(1, 28), dice.choice(_MONTHS)
    hour, price, count = dice.randint(7, 19), dice.randint(5, 900), dice.randint(2, 40)
    topic, place = dice.choice(words["topics"]), dice.choice(words["places"])
    return dice.choice(
        (
            f"Order {dice.randint(1000, 9999)} from {day} {month} contains {count} units of the {thing} at {price}.50 euros "
            f"and one {other}. It will be delivered to {place} between {hour}:00 and {hour + 2}:30.",
            f"The workshop on {topic} begins on {day} {month} at {hour}:15 in room {dice.randint(10, 400)}. "
            f"It costs {price} euros, lasts {dice.randint(2, 6)} hours and has {count} seats.",
            f"On {day} {month} at {hour}:40 {dice.choice(words['people'])} reported a broken {thing} in {place}. "
            f"The repair took {count} minutes and cost {price} euros. A new {other} was ordered.",
            f"The exhibition about {topic} was opened on {day} {month} {dice.randint(1950, 2023)} and had "
            f"{count * 1000 + price} visitors in {dice.randint(3, 11)} months. The largest object weighs {price} kg.",
        )
    )


def _summarizing(dice: random.Random, words: Words, paragraphs: list[str]) -> Turns:
    task = dice.choice(
        (
            "Summarize this text in one sentence.",
            "Summarize this text in three bullet points.",
            "What is this text about? Answer in two sentences.",
            "Write a title and a short summary of this text.",
            "Rewrite this text in simpler words.",
        )
    )
    return [f"{task}\n\n{dice.choice(paragraphs)}"]


def _lists(dice: random.Random, words: Words, paragraphs: list[str]) -> Turns:
    count = dice.choice(_COUNTS)
    task, topic = dice.choice(words["tasks"]), dice.choice(words["topics"])
    return [
        dice.choice(
            (
                f"Give me {count} tips for {task}.",
                f"List {count} facts about {topic}.",
                f"List the steps of {task}.",
                f"What should I check before I buy {dice.choice(words['things'])}? Answer with a numbered list.",
                f"Name {count} questions that I could ask {dice.choice(words['people'])}, with a reason for each.",
                f"List {count} common mistakes in {task} and how to avoid them.",
                f"Give me {count} ideas for a project about {topic}, each with a short description.",
                f"List {count} things that I need for {task} and what each is for.",
                f"Make a checklist for {task}.",
            )
        )
    ]


def _translation(dice: random.Random, words: Words, paragraphs: list[str]) -> Turns:
    language, first = dice.choice(words["languages"]), dice.choice(words["sentences"])
    return [
        dice.choice(
            (
                f"Translate into {language}: {first}",
                f"Translate these sentences into {language}: {first} {dice.choice(words['sentences'])}",
                f'How do I say "{first}" in {language}?',
                f"Translate into {language} and explain the grammar: {first}",
            )
        )
    ]


def _chat(dice: random.Random, words: Words, paragraphs: list[str]) -> Turns:
    first = dice.choice((_writing, _reasoning, _code, _lists))(dice, words, paragraphs)
    return [*first, dice.choice(words["follow_ups"])]


_KINDS: dict[str, Callable[[random.Random, Words, list[str]], Turns]] = {
    "writing": _writing,
    "reasoning": _reasoning,
    "code": _code,
    "extraction": _extraction,
    "summarizing": _summarizing,
    "lists": _lists,
    "translation": _translation,
    "chat": _chat,
}
_STYLED = ("writing", "reasoning", "code", "lists")


def main() -> None:
    """Write prompts to a file, one JSON object per line."""
    parser = argparse.ArgumentParser(description="Write seeded prompts of eight kinds, one JSON object per line.")
    parser.add_argument("target", type=Path)
    parser.add_argument("--count", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    lines = [json.dumps(prompt, ensure_ascii=False) + "\n" for prompt in prompts(options.count, options.seed)]
    options.target.write_text("".join(lines), "utf-8")


if __name__ == "__main__":
    main()
