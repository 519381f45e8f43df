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
from functools import partial
from pathlib import Path

from recipes.chat_prompts import prompts, titled_lists
from recipes.own_prompts import own_prompts
from spaceport.tools.cli import run
from spaceport.tools.tune.conversations import read_conversations
from spaceport.tools.tune.extract import Tree, extract

_VALIDATION = 40  # one answer in 40 is held out
_ANSWER, _LIST = 160, 400  # maximum tokens of an answer; lists must be complete to fork
_DRAFTS = (
    *("--objective", "sar", "--mask-slots", "4", "--drop-rate", "0.3", "--anchors", "160", "--correction-rank", "64"),
    *("--rank", "32", "--alpha", "64", "--target", "o_proj", "--target", "down_proj"),
    *("--epochs", "12", "--learning-rate", "1e-3"),
)
_FORKS = ("--objective", "apar", "--unfork-rate", "0.05", "--epochs", "6", "--learning-rate", "5e-2")
_NUMBERED = re.compile(r"^\d+\. ", re.MULTILINE)
_TRAINING = (
    *("--method", "gated-lora", "--adapter-only"),
    *("--batch-size", "4", "--micro-batch-size", "2", "--cutoff", "768"),
)

Step = Callable[[Path], None]  # writes its result to a path


@dataclass(frozen=True)
class Recipe:
    """Files and amounts of one run."""

    base: Path  # GGUF file or checkpoint folder
    work: Path
    answers: int  # prompts of all kinds, from templates
    own: int  # prompts that the base model writes itself
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
    for name, step in _steps(recipe):
        if not recipe.file(name).exists():
            print(f"== {name}", flush=True)
            step(recipe.file(name))
    return recipe.file("adapter" if recipe.fork_time else "drafts")


def _steps(recipe: Recipe) -> Iterator[tuple[str, Step]]:
    """The steps in order, with the names of their results."""

    def distill(source: str, tokens: int) -> Step:
        files = recipe.file("base.bundle"), recipe.file(source)
        return lambda target: _command("distill", *files, target, "--max-tokens", tokens)

    def tune(data: str, *options: object) -> Step:
        return lambda target: _tune(recipe, target, recipe.file(data), *options)

    def write_list_prompts(target: Path) -> None:
        _write(target, [prompt for prompt in prompts(8 * recipe.lists, seed=1) if prompt["kind"] == "lists"])

    yield "prompts.jsonl", lambda target: _write(target, prompts(recipe.answers, seed=0))
    yield "base.bundle", lambda target: _command("export", recipe.base, target, "--weights", "int8")
    yield (
        "own_prompts.jsonl",
        lambda target: _write(target, own_prompts(recipe.file("base.bundle"), recipe.own, seed=0)),
    )
    yield "answers.jsonl", distill("prompts.jsonl", _ANSWER)
    yield "own_answers.jsonl", distill("own_prompts.jsonl", _ANSWER)
    yield "list_prompts.jsonl", write_list_prompts
    yield "list_answers.jsonl", distill("list_prompts.jsonl", _LIST)
    yield "train.jsonl", partial(_split, recipe)
    yield "drafts", tune("train.jsonl", *_DRAFTS, "--time-budget", recipe.draft_time)
    if recipe.fork_time:
        yield "titled_prompts.jsonl", lambda target: _write(target, titled_lists(recipe.titled, seed=2))
        yield "titled_answers.jsonl", distill("titled_prompts.jsonl", _LIST)
        yield "forks.jsonl", partial(_select_forks, recipe)
        further = ("--adapter", recipe.file("drafts"), "--time-budget", recipe.fork_time)
        yield "adapter", tune("forks.jsonl", *_FORKS, *further)


def _split(recipe: Recipe, target: Path) -> None:
    lines = [*_read(recipe.file("answers.jsonl")), *_read(recipe.file("own_answers.jsonl"))]
    _write(recipe.file("validation.jsonl"), lines[::_VALIDATION])
    kept = [line for number, line in enumerate(lines) if number % _VALIDATION]
    _write(target, [*kept, *_read(recipe.file("list_answers.jsonl"))])


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
    parser.add_argument("--answers", type=int, default=2528, help="number of prompts from templates")
    parser.add_argument("--own", type=int, default=2000, help="number of prompts that the base model writes itself")
    parser.add_argument("--lists", type=int, default=128, help="number of further prompts that ask for a list")
    parser.add_argument("--titled", type=int, default=160, help="number of prompts for lists with titles, for forks")
    parser.add_argument("--draft-time", default="96m", help="training time of the drafts")
    parser.add_argument("--fork-time", default="12m", help="training time of the forks; 0s: no forks")
    parser.add_argument(
        "--no-bf16", dest="bf16", action="store_false", help="compute in float32, on CPUs without bfloat16"
    )
    options = vars(parser.parse_args())
    fork_time = options.pop("fork_time")
    recipe = Recipe(**options, fork_time=None if fork_time == "0s" else fork_time)
    try:
        print(follow(recipe))
    except ValueError as error:  # too few different prompts
        sys.exit(str(error))
    except StepFailed as error:
        sys.exit(f"{error}; the same command continues with this step")


if __name__ == "__main__":
    main()
