"""Evaluation: accuracy of the demo model and the steps that forks and drafts save, on held-out files."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from recipes.corpus import collect, read_source, stdlib_paths
from recipes.signatures import FEWEST_ITEMS, AnswerVerdict, Function, question, verify
from spaceport.exporter.checkpoint_source import quiet_libraries
from spaceport.graphs.contract.faults import InputFault, OptionFault
from spaceport.runtime.session import Runtime
from spaceport.runtime.text.tokenizer import encode
from spaceport.tools.terminal.screen import show_json, show_table, stages
from spaceport.tools.verify.acceptance.answers import Answer, generate_answer
from spaceport.tools.verify.acceptance.source import SourceOptions, open_source

NOTE = (
    "The answers are templated and the model is tiny: these figures show that the methods work. They are not comparable "
    "with published results."
)
MASK_SLOTS = (0, 1, 3, 5)
MOST_TOKENS = 480  # per answer; the longest correct one has about 400
LONGEST_MISTAKE = 200  # characters shown per mistake
PROMPT_TOKENS, TEXT_TOKENS = 48, 64  # prompt and continuation of a source text


@dataclass(frozen=True)
class QuestionAnswers:
    """One question and the model's answers to it."""

    function: Function
    forked: Answer
    sequential: Answer  # forked, one thread at a time
    unforked: Answer  # with [Fork] banned
    verdict: AnswerVerdict  # on the forked answer
    unforked_verdict: AnswerVerdict

    @property
    def forks_correct(self) -> bool:
        """Whether the answer forked once per item of the correct answer."""
        return len(self.forked.children) == self.verdict.expected


@dataclass(frozen=True)
class Quality:
    """Counts of correct answers of one kind."""

    questions: int
    forks_correct: int
    items: int
    items_correct: int
    exact: int
    exact_unforked: int  # exact answers with [Fork] banned


@dataclass(frozen=True)
class DraftingCost:
    """Steps at one number of mask slots, summed over all generations; drafts do not change the output."""

    mask_slots: int
    chat_tokens: int  # of unforked answers
    chat_steps: int
    source_tokens: int
    source_steps: int
    sequential_tokens: int  # of all threads of forked answers
    sequential_steps: int
    plain_steps: int  # for the same text without drafts or forks
    parallel_steps: int  # of forked answers, whose threads share steps
    changed: int  # outputs that differ from those without drafts, because of floating-point rounding

    def as_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "chat_tokens_per_step": self.chat_tokens / self.chat_steps,
            "source_tokens_per_step": self.source_tokens / self.source_steps,
            "thread_tokens_per_step": self.sequential_tokens / self.sequential_steps,
            "fewer_steps": self.plain_steps / self.parallel_steps,
        }


@dataclass(frozen=True)
class Evaluation:
    """All results."""

    lists: Quality
    sentences: Quality
    costs: tuple[DraftingCost, ...]
    mistakes: tuple[tuple[str, tuple[str, ...]], ...]  # in list answers: question and mistakes

    def as_dict(self) -> dict[str, Any]:
        return {
            "note": NOTE,
            "python": platform.python_version(),
            "lists": asdict(self.lists),
            "sentences": asdict(self.sentences),
            "costs": [cost.as_dict() for cost in self.costs],
            "mistakes": [{"question": question, "mistakes": list(mistakes)} for question, mistakes in self.mistakes],
        }


def evaluate(
    runtime: Runtime, functions: Sequence[Function], texts: Sequence[str], announce: Callable[[str], None]
) -> Evaluation:
    """Answer questions about functions and continue texts, at each number of mask slots that the model supports."""
    listed = [function for function in functions if len(function.parameters) >= FEWEST_ITEMS]
    short = [function for function in functions if len(function.parameters) < FEWEST_ITEMS]
    if not listed or not texts:
        raise ValueError(f"{len(listed)} functions with a list and {len(texts)} texts: expected at least one of each")
    announce(f"answering {len(short)} questions with a sentence")
    sentences = [answer_question(runtime, function, 0) for function in short]
    chats: dict[int, list[QuestionAnswers]] = {}
    sources: dict[int, list[Answer]] = {}
    for slots in MASK_SLOTS:
        if slots <= runtime.bundle.manifest.drafts.mask_slots:
            announce(f"answering {len(listed)} questions and continuing {len(texts)} texts at k = {slots}")
            chats[slots] = [answer_question(runtime, function, slots) for function in listed]
            sources[slots] = [continue_text(runtime, text, slots) for text in texts]
    costs = tuple(cost_of(slots, chats, sources) for slots in chats)
    wrong = tuple((question(one.function), one.verdict.mistakes) for one in chats[0] if not one.verdict.exact)
    return Evaluation(quality_of(chats[0]), quality_of(sentences), costs, wrong)


def answer_question(runtime: Runtime, function: Function, mask_slots: int) -> QuestionAnswers:
    """Answers to a question: forked, forked sequentially, and unforked."""
    prompt = runtime.tokens_of([{"role": "user", "content": question(function)}])
    forked = generate_answer(runtime, prompt, MOST_TOKENS, mask_slots)
    sequential = generate_answer(runtime, prompt, MOST_TOKENS, mask_slots, max_threads=1)
    unforked = generate_answer(runtime, prompt, MOST_TOKENS, mask_slots, max_depth=0)
    verdicts = [verify(function, runtime.tokenizer.decode(list(one.text_tokens))) for one in (forked, unforked)]
    return QuestionAnswers(function, forked, sequential, unforked, *verdicts)


def continue_text(runtime: Runtime, text: str, mask_slots: int) -> Answer:
    """Unforked continuation of a source text."""
    prompt = encode(runtime.tokenizer, text, special=True)[:PROMPT_TOKENS]
    return generate_answer(runtime, prompt, TEXT_TOKENS, mask_slots, max_depth=0)


def quality_of(found: Sequence[QuestionAnswers]) -> Quality:
    """Count the correct answers."""
    return Quality(
        questions=len(found),
        forks_correct=sum(one.forks_correct for one in found),
        items=sum(one.verdict.expected for one in found),
        items_correct=sum(sum(one.verdict.correct) for one in found),
        exact=sum(one.verdict.exact for one in found),
        exact_unforked=sum(one.unforked_verdict.exact for one in found),
    )


def cost_of(slots: int, chats: dict[int, list[QuestionAnswers]], sources: dict[int, list[Answer]]) -> DraftingCost:
    """Steps at `slots` mask slots; both dictionaries are keyed by the number of mask slots."""
    unforked = [one.unforked for one in chats[slots]]
    sequential = [one.sequential for one in chats[slots]]
    forked = [one.forked for one in chats[slots]]
    pairs = zip(_texts(chats[slots], sources[slots]), _texts(chats[0], sources[0]), strict=True)
    return DraftingCost(
        mask_slots=slots,
        chat_tokens=_tokens(unforked),
        chat_steps=_steps(unforked),
        source_tokens=_tokens(sources[slots]),
        source_steps=_steps(sources[slots]),
        sequential_tokens=_tokens(sequential),
        sequential_steps=_steps(sequential),
        plain_steps=sum(len(answer.text_tokens) + 1 for answer in forked),
        parallel_steps=_steps(forked),
        changed=sum(text != plain for text, plain in pairs),
    )


def _tokens(answers: Sequence[Answer]) -> int:
    return sum(len(line.tokens) for answer in answers for line in answer.threads)


def _steps(answers: Sequence[Answer]) -> int:
    return sum(answer.statistics.steps for answer in answers)


def _texts(chats: Sequence[QuestionAnswers], sources: Sequence[Answer]) -> list[tuple[int, ...]]:
    answers = (*(one.forked for one in chats), *(one.unforked for one in chats), *sources)
    return [answer.text_tokens for answer in answers]


@click.command("evaluate", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("model", metavar="BUNDLE|CHECKPOINT", type=click.Path(path_type=Path))
@click.option("--questions", default=150, show_default=True, metavar="N", help="Maximum questions per kind.")
@click.option("--texts", default=50, show_default=True, metavar="N", help="Maximum source texts to continue.")
@click.option("--threads", default=1, show_default=True, metavar="N", help="CPU threads.")
@click.option(
    "--mistakes", "shown", default=0, show_default=True, metavar="N", help="Show the first N incorrect list answers."
)
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
def command(model: Path, questions: int, texts: int, threads: int, shown: int, as_json: bool) -> None:
    """Ask the demo model about functions of the standard library's files that are held out of training."""
    for name, count in (("--questions", questions), ("--texts", texts)):
        if count < 1:
            raise OptionFault(f"{name} is {count}: expected at least 1")
    quiet_libraries()
    with stages() as stage:
        stage("opening the model")
        with open_source(model, SourceOptions(threads=threads)) as runtime:
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
            _share(one.forks_correct, one.questions),
            _share(one.items_correct, one.items),
            _share(one.exact, one.questions),
            _share(one.exact_unforked, one.questions),
        )
        for name, one in kinds
    ]
    columns = ("answered with", "questions", "forks correct", "items correct", "exact", "exact, forks banned")
    show_table(f"functions held out of training, Python {platform.python_version()}", columns, rows)
    click.echo()
    costs = [
        (
            f"k = {cost.mask_slots}" if cost.mask_slots else "no drafts",
            cost.chat_tokens / cost.chat_steps,
            cost.source_tokens / cost.source_steps,
            cost.sequential_tokens / cost.sequential_steps,
            cost.parallel_steps / found.lists.questions,
            cost.plain_steps / cost.parallel_steps,
            cost.changed,
        )
        for cost in found.costs
    ]
    names = ("drafts", "chat", "source text", "threads", "parallel steps", "plain / parallel", "outputs changed")
    show_table(
        "tokens per step, unforked and in sequential threads; steps per list answer with parallel threads", names, costs
    )
    for asked, mistakes in found.mistakes[:shown]:
        click.echo("\n  ".join((f"\n{asked}", *(mistake[:LONGEST_MISTAKE] for mistake in mistakes))))
    click.echo(f"\n{NOTE}")


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def main() -> int:
    """Run the evaluation and return the exit code."""
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
