"""Evaluation: how often the demo model's answers are right, and what forks and drafts save, on files held out of training."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from spaceport.exporter.quiet import quiet_libraries
from spaceport.graphs.contract.faults import InputFault, OptionFault
from spaceport.runtime.session import Runtime
from spaceport.runtime.text.tokenizer import encode
from spaceport.tools.demo_recipe.corpus import collect
from spaceport.tools.demo_recipe.parameter_answers import FEWEST_ITEMS, AnswerVerdict, question, verify
from spaceport.tools.demo_recipe.signatures import Function
from spaceport.tools.demo_recipe.sources import read_source, stdlib_paths
from spaceport.tools.terminal.screen import show_json, show_table, stages
from spaceport.tools.verify.acceptance.answers import Answer, generate_answer
from spaceport.tools.verify.acceptance.source import open_source

NOTE = (
    "The answers are templated and the model is tiny: these numbers show that the methods work, and are no comparison "
    "with published ones."
)
MASK_SLOTS = (0, 1, 3, 5)
MOST_TOKENS = 480  # of an answer; the longest right one has about 400
LONGEST_MISTAKE = 200  # characters that are shown of one
PROMPT_TOKENS, TEXT_TOKENS = 48, 64  # of a source text that is continued


@dataclass(frozen=True)
class Written:
    """One question with what the model wrote."""

    function: Function
    forked: Answer
    one_by_one: Answer  # the same, its threads written one after the other
    line: Answer  # the answer again with [Fork] banned
    verdict: AnswerVerdict  # on the forked answer
    line_verdict: AnswerVerdict

    @property
    def forks_right(self) -> bool:
        """Whether it forked once for each item of the right answer."""
        return len(self.forked.children) == self.verdict.expected


@dataclass(frozen=True)
class Quality:
    """How many answers of one kind are right."""

    questions: int
    forks_right: int
    items: int
    items_right: int
    exact: int
    exact_unforked: int  # with [Fork] banned


@dataclass(frozen=True)
class DraftingCost:
    """What drafts of so many mask slots cost, summed over all texts; drafts change no text."""

    mask_slots: int
    chat_tokens: int  # of answers in one line, forks banned
    chat_steps: int
    source_tokens: int
    source_steps: int
    one_by_one_tokens: int  # of forked answers with all that their threads write
    one_by_one_steps: int
    plain_steps: int  # of the forked answers' texts in one line without drafts
    parallel_steps: int  # of the forked answers, whose threads share steps
    changed: int  # texts that differ from those without drafts; rounding could

    def as_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "chat_tokens_per_step": self.chat_tokens / self.chat_steps,
            "source_tokens_per_step": self.source_tokens / self.source_steps,
            "thread_tokens_per_step": self.one_by_one_tokens / self.one_by_one_steps,
            "fewer_steps": self.plain_steps / self.parallel_steps,
        }


@dataclass(frozen=True)
class Evaluation:
    """All that is measured."""

    lists: Quality
    sentences: Quality
    paces: tuple[DraftingCost, ...]
    mistakes: tuple[tuple[str, tuple[str, ...]], ...]  # of lists: the question and what is wrong

    def as_dict(self) -> dict[str, Any]:
        return {
            "note": NOTE,
            "python": platform.python_version(),
            "lists": asdict(self.lists),
            "sentences": asdict(self.sentences),
            "paces": [cost.as_dict() for cost in self.paces],
            "mistakes": [{"question": asked, "mistakes": list(told)} for asked, told in self.mistakes],
        }


def evaluate(
    runtime: Runtime, functions: Sequence[Function], texts: Sequence[str], announce: Callable[[str], None]
) -> Evaluation:
    """Answers questions about functions and continues texts, at each number of mask slots that the model has."""
    listed = [function for function in functions if len(function.parameters) >= FEWEST_ITEMS]
    short = [function for function in functions if len(function.parameters) < FEWEST_ITEMS]
    if not listed or not texts:
        raise ValueError(f"{len(listed)} functions with a list and {len(texts)} texts: expected at least one of each")
    announce(f"answering {len(short)} questions with a sentence")
    sentences = [write(runtime, function, 0) for function in short]
    chats: dict[int, list[Written]] = {}
    sources: dict[int, list[Answer]] = {}
    for slots in MASK_SLOTS:
        if slots <= runtime.bundle.manifest.max_mask_slots:
            announce(f"answering {len(listed)} questions and continuing {len(texts)} texts at k = {slots}")
            chats[slots] = [write(runtime, function, slots) for function in listed]
            sources[slots] = [go_on(runtime, text, slots) for text in texts]
    paces = tuple(cost_of(slots, chats, sources) for slots in chats)
    wrong = tuple((question(one.function), one.verdict.mistakes) for one in chats[0] if not one.verdict.exact)
    return Evaluation(quality_of(chats[0]), quality_of(sentences), paces, wrong)


def write(runtime: Runtime, function: Function, mask_slots: int) -> Written:
    """The answer to a question, with forks and in one line."""
    prompt = runtime.tokens_of([{"role": "user", "content": question(function)}])
    forked = generate_answer(runtime, prompt, MOST_TOKENS, mask_slots)
    one_by_one = generate_answer(runtime, prompt, MOST_TOKENS, mask_slots, max_threads=1)
    line = generate_answer(runtime, prompt, MOST_TOKENS, mask_slots, max_depth=0)
    told = runtime.tokenizer.decode(list(forked.text_tokens))
    plain = runtime.tokenizer.decode(list(line.text_tokens))
    return Written(function, forked, one_by_one, line, verify(function, told), verify(function, plain))


def go_on(runtime: Runtime, text: str, mask_slots: int) -> Answer:
    """What follows the beginning of a source text, in one line."""
    prompt = encode(runtime.tokenizer, text, special=True)[:PROMPT_TOKENS]
    return generate_answer(runtime, prompt, TEXT_TOKENS, mask_slots, max_depth=0)


def quality_of(found: Sequence[Written]) -> Quality:
    """How many of some answers are right."""
    return Quality(
        questions=len(found),
        forks_right=sum(one.forks_right for one in found),
        items=sum(one.verdict.expected for one in found),
        items_right=sum(sum(one.verdict.right) for one in found),
        exact=sum(one.verdict.exact for one in found),
        exact_unforked=sum(one.line_verdict.exact for one in found),
    )


def cost_of(slots: int, chats: dict[int, list[Written]], sources: dict[int, list[Answer]]) -> DraftingCost:
    """What drafts of so many mask slots cost; chats and texts are told by their mask slots."""
    lines = [one.line for one in chats[slots]]
    one_by_one = [one.one_by_one for one in chats[slots]]
    forked = [one.forked for one in chats[slots]]
    texts = zip(_texts(chats[slots], sources[slots]), _texts(chats[0], sources[0]), strict=True)
    return DraftingCost(
        mask_slots=slots,
        chat_tokens=_tokens(lines),
        chat_steps=_steps(lines),
        source_tokens=_tokens(sources[slots]),
        source_steps=_steps(sources[slots]),
        one_by_one_tokens=_tokens(one_by_one),
        one_by_one_steps=_steps(one_by_one),
        plain_steps=sum(len(answer.text_tokens) + 1 for answer in forked),
        parallel_steps=_steps(forked),
        changed=sum(text != plain for text, plain in texts),
    )


def _tokens(answers: Sequence[Answer]) -> int:
    return sum(len(line.tokens) for answer in answers for line in answer.threads)


def _steps(answers: Sequence[Answer]) -> int:
    return sum(answer.statistics.steps for answer in answers)


def _texts(chats: Sequence[Written], sources: Sequence[Answer]) -> list[tuple[int, ...]]:
    answers = (*(one.forked for one in chats), *(one.line for one in chats), *sources)
    return [answer.text_tokens for answer in answers]


@click.command("evaluate", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("model", metavar="BUNDLE|CHECKPOINT", type=click.Path(path_type=Path))
@click.option("--questions", default=150, show_default=True, metavar="N", help="Most questions of each kind.")
@click.option("--texts", default=50, show_default=True, metavar="N", help="Most source texts to continue.")
@click.option("--threads", default=1, show_default=True, metavar="N", help="Processor threads.")
@click.option("--mistakes", "shown", default=0, show_default=True, metavar="N", help="Show the first N wrong lists.")
@click.option("--json", "as_json", is_flag=True, help="Print the numbers as JSON.")
def command(model: Path, questions: int, texts: int, threads: int, shown: int, as_json: bool) -> None:
    """Ask the demo model about functions of the standard library's files that are held out of training."""
    for name, count in (("--questions", questions), ("--texts", texts)):
        if count < 1:
            raise OptionFault(f"{name} is {count}: expected at least 1")
    quiet_libraries()
    with stages() as stage:
        stage("opening the model")
        with open_source(model, "auto", None, threads, False) as runtime:
            if runtime.bundle.manifest.tokens.fork is None:
                raise InputFault(f"{model}: has no fork token: expected the demo model, which forks")
            stage("reading the standard library")
            corpus = collect([read_source(path) for path in stdlib_paths()], lists=0)
            found = evaluate(runtime, chosen(corpus.held_out, questions), corpus.held_out_texts[:texts], stage)
    if as_json:
        show_json(found.as_dict())
    else:
        show(found, shown)


def chosen(functions: Sequence[Function], most: int) -> list[Function]:
    """The first functions that are answered with a list, and as many that are answered with a sentence."""
    listed = [function for function in functions if len(function.parameters) >= FEWEST_ITEMS]
    short = [function for function in functions if len(function.parameters) < FEWEST_ITEMS]
    return [*listed[:most], *short[:most]]


def show(found: Evaluation, shown: int) -> None:
    """The tables for people."""
    kinds = (("a list", found.lists), ("a sentence", found.sentences))
    rows = [
        (
            name,
            one.questions,
            _share(one.forks_right, one.questions),
            _share(one.items_right, one.items),
            _share(one.exact, one.questions),
            _share(one.exact_unforked, one.questions),
        )
        for name, one in kinds
    ]
    columns = ("answered with", "questions", "forks right", "items right", "exact", "exact, forks banned")
    show_table(f"functions held out of training, Python {platform.python_version()}", columns, rows)
    click.echo()
    paces = [
        (
            f"k = {cost.mask_slots}" if cost.mask_slots else "no drafts",
            cost.chat_tokens / cost.chat_steps,
            cost.source_tokens / cost.source_steps,
            cost.one_by_one_tokens / cost.one_by_one_steps,
            cost.parallel_steps / found.lists.questions,
            cost.plain_steps / cost.parallel_steps,
            cost.changed,
        )
        for cost in found.paces
    ]
    names = ("drafts", "chat", "source text", "threads", "parallel steps", "fewer than plain", "texts changed")
    show_table("tokens a step in one line and in threads; steps of a list with its threads side by side", names, paces)
    for asked, told in found.mistakes[:shown]:
        click.echo("\n  ".join((f"\n{asked}", *(mistake[:LONGEST_MISTAKE] for mistake in told))))
    click.echo(f"\n{NOTE}")


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def main() -> int:
    """Evaluates; the exit code."""
    try:
        command.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (OptionFault, InputFault) as error:
        click.echo(f"error: {error}", err=True)
        return 2 if isinstance(error, OptionFault) else 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
