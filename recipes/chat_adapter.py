"""Chat adapter: the recipe of the adapter in `tools/demo/chat`, from prompts to the trained folder.

Each step is a command of Spaceport; a step whose result exists is not repeated, so the recipe continues where it stopped.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from recipes.chat_prompts import prompts, titled_lists
from spaceport.tools.cli import run
from spaceport.tools.tune.conversations import read_conversations
from spaceport.tools.tune.extract import Tree, extract

_VALIDATION = 40  # one answer in 40 is held out
_ANSWER, _LIST = 160, 400  # maximum tokens of an answer; lists must be complete to fork
_DRAFTS = (
    "--objective",
    "sar",
    "--mask-slots",
    "4",
    "--drop-rate",
    "0.3",
    "--anchors",
    "64",
    "--correction-rank",
    "64",
)
_LAYERS = ("--rank", "32", "--alpha", "64", "--target", "o_proj", "--target", "down_proj")
_FORKS = ("--objective", "apar", "--unfork-rate", "0.05")
_NUMBERED = re.compile(r"^\d+\. ", re.MULTILINE)
_TRAINING = (
    "--method",
    "gated-lora",
    "--adapter-only",
    "--batch-size",
    "4",
    "--micro-batch-size",
    "4",
    "--cutoff",
    "768",
)


@dataclass(frozen=True)
class Recipe:
    """Files and amounts of one run."""

    base: Path  # GGUF file or checkpoint folder
    work: Path
    answers: int  # prompts of all kinds
    lists: int  # further prompts that ask for a list, with longer answers
    titled: int  # prompts that ask for a list whose items have titles, for the training of forks
    draft_time: str
    fork_time: str | None  # None: the adapter learns to draft only
    bf16: bool

    def file(self, name: str) -> Path:
        return self.work / name


class StepFailed(RuntimeError):
    """A command that ended with an error, which it has printed."""


def follow(recipe: Recipe) -> Path:
    """The adapter folder after all steps that have no result yet."""
    recipe.work.mkdir(parents=True, exist_ok=True)
    steps: list[tuple[str, Callable[[Recipe, Path], None]]] = [
        ("prompts.jsonl", _write_prompts),
        ("base.bundle", _export),
        ("answers.jsonl", _distill),
        ("list_prompts.jsonl", _write_list_prompts),
        ("list_answers.jsonl", _distill_lists),
        ("train.jsonl", _split),
        ("drafts", _train_drafts),
    ]
    forks: list[tuple[str, Callable[[Recipe, Path], None]]] = [
        ("titled_prompts.jsonl", _write_titled_prompts),
        ("titled_answers.jsonl", _distill_titled),
        ("forks.jsonl", _select_forks),
        ("adapter", _train_forks),
    ]
    for name, step in [*steps, *(forks if recipe.fork_time else ())]:
        if not recipe.file(name).exists():
            print(f"== {name}", flush=True)
            step(recipe, recipe.file(name))
    return recipe.file("adapter" if recipe.fork_time else "drafts")


def _write_prompts(recipe: Recipe, target: Path) -> None:
    _write(target, prompts(recipe.answers, seed=0))


def _export(recipe: Recipe, target: Path) -> None:
    _command("export", recipe.base, target, "--weights", "int8")


def _distill(recipe: Recipe, target: Path) -> None:
    _answer(recipe, "prompts.jsonl", target, _ANSWER)


def _write_list_prompts(recipe: Recipe, target: Path) -> None:
    found = [prompt for prompt in prompts(8 * recipe.lists, seed=1) if prompt["kind"] == "lists"]
    _write(target, found)


def _distill_lists(recipe: Recipe, target: Path) -> None:
    _answer(recipe, "list_prompts.jsonl", target, _LIST)


def _answer(recipe: Recipe, given: str, target: Path, tokens: int) -> None:
    _command("distill", recipe.file("base.bundle"), recipe.file(given), target, "--max-tokens", tokens)


def _split(recipe: Recipe, target: Path) -> None:
    lines = _read(recipe.file("answers.jsonl"))
    _write(recipe.file("validation.jsonl"), lines[::_VALIDATION])
    kept = [line for number, line in enumerate(lines) if number % _VALIDATION]
    _write(target, [*kept, *_read(recipe.file("list_answers.jsonl"))])


def _train_drafts(recipe: Recipe, target: Path) -> None:
    budget = ("--time-budget", recipe.draft_time, "--epochs", "12", "--learning-rate", "1e-3")
    _tune(recipe, target, recipe.file("train.jsonl"), *_DRAFTS, *_LAYERS, *budget)


def _write_titled_prompts(recipe: Recipe, target: Path) -> None:
    _write(target, titled_lists(recipe.titled, seed=2))


def _distill_titled(recipe: Recipe, target: Path) -> None:
    _answer(recipe, "titled_prompts.jsonl", target, _LIST)


def _select_forks(recipe: Recipe, target: Path) -> None:
    """Write the finished lists that fork, and as many finished answers that do not: lists without titles, and others."""
    found: dict[str, list[dict[str, object]]] = {"list": [], "paragraphs": [], "numbered": [], "other": []}
    for name in ("titled_answers.jsonl", "train.jsonl"):
        for kind, line in _finished(recipe.file(name)):
            found[kind].append(line)
    half = len(found["list"]) // 2
    _write(target, [*found["list"], *found["numbered"][:half], *found["other"][: len(found["list"]) - half]])


def _finished(file: Path) -> Iterator[tuple[str, dict[str, object]]]:
    """The lines of a file with finished answers; each with the kind of its paragraph tree, if it has one."""
    lines = {number: json.loads(line) for number, line in enumerate(file.read_text("utf-8").splitlines(), 1)}
    for conversation in read_conversations(file):
        answer = conversation.answer or ""
        if conversation.ends:
            tree = extract(answer)
            unforked = "numbered" if _NUMBERED.search(answer) else "other"
            yield tree.kind if isinstance(tree, Tree) else unforked, lines[conversation.line]


def _train_forks(recipe: Recipe, target: Path) -> None:
    budget = ("--time-budget", str(recipe.fork_time), "--epochs", "6", "--learning-rate", "5e-2")
    further = ("--adapter", recipe.file("drafts"))
    _tune(recipe, target, recipe.file("forks.jsonl"), *_FORKS, *further, *budget)


def _tune(recipe: Recipe, target: Path, data: Path, *options: object) -> None:
    more = ("--bf16",) if recipe.bf16 else ()
    resumed = ("--resume",) if Path(f"{target}.training").exists() else ()
    held_out = ("--validation", recipe.file("validation.jsonl"))
    _command("tune", recipe.base, target, data, *_TRAINING, *options, *held_out, *more, *resumed)


def _command(*arguments: object) -> None:
    words = [str(argument) for argument in arguments]
    print(f"spaceport {' '.join(words)}", flush=True)
    if code := run(words):
        raise StepFailed(f"spaceport {words[0]} ended with exit code {code}")


def _read(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines() if line.strip()]


def _write(file: Path, lines: Sequence[dict[str, object]]) -> None:
    file.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), "utf-8")


def main() -> None:
    """Follow the recipe in a work folder."""
    parser = argparse.ArgumentParser(description="Train the adapter of the chat demo in a work folder.")
    parser.add_argument("work", type=Path)
    parser.add_argument("--base", type=Path, required=True, help="GGUF file or checkpoint folder of the base model")
    parser.add_argument("--answers", type=int, default=2528, help="number of generated prompts")
    parser.add_argument("--lists", type=int, default=128, help="number of further prompts that ask for a list")
    parser.add_argument("--titled", type=int, default=160, help="number of prompts for lists with titles, for forks")
    parser.add_argument("--draft-time", default="96m", help="training time of the drafts")
    parser.add_argument("--fork-time", default="12m", help="training time of the forks; 0s: no forks")
    parser.add_argument("--no-bf16", action="store_true", help="compute in float32, on CPUs without bfloat16")
    given = parser.parse_args()
    recipe = Recipe(
        given.base,
        given.work,
        given.answers,
        given.lists,
        given.titled,
        given.draft_time,
        None if given.fork_time == "0s" else given.fork_time,
        not given.no_bf16,
    )
    try:
        print(follow(recipe))
    except StepFailed as error:
        sys.exit(f"{error}; the same command continues with this step")


if __name__ == "__main__":
    main()
