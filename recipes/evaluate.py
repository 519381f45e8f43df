"""Evaluation: accuracy of the demo model and the steps that forks and drafts save, on held-out files."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from recipes.corpus import collect, read_source, stdlib_paths
from recipes.signatures import FEWEST_ITEMS, AnswerVerdict, Function, question, verify
from spaceport.exporter.checkpoint_source import quiet_libraries
from spaceport.graphs.contract.faults import InputFault, OptionFault
from spaceport.runtime.session import Runtime
from spaceport.runtime.text.tokenizer import encode
from spaceport.tools.cli import run
from spaceport.tools.terminal.screen import show_json, stages
from spaceport.tools.verify.acceptance import SourceOptions, open_source
from spaceport.tools.verify.answers import Answer, generate_answer

NOTE = (
    "The answers are templated and the model is tiny: these figures show that the methods work. They are not comparable "
    "with published results."
)
MASK_SLOTS = (0, 1, 3, 5)
MOST_TOKENS = 480  # per answer; the longest correct one has about 400
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


def evaluate(
    runtime: Runtime, functions: Sequence[Function], texts: Sequence[str], announce: Callable[[str], None]
) -> dict[str, Any]:
    """Answer questions about functions and continue texts, at each number of mask slots that the model supports.

    The result is JSON-compatible: counts of correct answers, `costs` in steps, and the mistakes in answers with a list.
    """
    listed, short = split(functions)
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
    wrong = [answers for answers in chats[0] if not answers.verdict.exact]
    return {
        "note": NOTE,
        "python": platform.python_version(),
        "lists": quality_of(chats[0]),
        "sentences": quality_of(sentences),
        "costs": [cost_of(slots, chats, sources) for slots in chats],
        "mistakes": [
            {"question": question(answers.function), "mistakes": list(answers.verdict.mistakes)} for answers in wrong
        ],
    }


def split(functions: Sequence[Function]) -> tuple[list[Function], list[Function]]:
    """The functions that are answered with a list, and those that are answered with a sentence."""
    listed = [function for function in functions if len(function.parameters) >= FEWEST_ITEMS]
    return listed, [function for function in functions if len(function.parameters) < FEWEST_ITEMS]


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


def quality_of(answered: Sequence[QuestionAnswers]) -> dict[str, int]:
    """Counts of correct answers."""
    return {
        "questions": len(answered),
        "forks_correct": sum(answers.forks_correct for answers in answered),
        "items": sum(answers.verdict.expected for answers in answered),
        "items_correct": sum(sum(answers.verdict.correct) for answers in answered),
        "exact": sum(answers.verdict.exact for answers in answered),
        "exact_unforked": sum(answers.unforked_verdict.exact for answers in answered),  # with [Fork] banned
    }


def cost_of(
    slots: int, chats: dict[int, list[QuestionAnswers]], sources: dict[int, list[Answer]]
) -> dict[str, int | float]:
    """Tokens and steps at `slots` mask slots, over all generations; both dictionaries are keyed by the number of mask slots.

    Plain steps write the same text without drafts or forks. Parallel steps are those of forked answers, whose threads share
    steps. Drafts do not change the output, except for floating-point rounding.
    """
    unforked = [answers.unforked for answers in chats[slots]]
    sequential = [answers.sequential for answers in chats[slots]]
    forked = [answers.forked for answers in chats[slots]]
    plain, parallel = sum(len(answer.text_tokens) + 1 for answer in forked), _steps(forked)
    pairs = zip(_texts(chats[slots], sources[slots]), _texts(chats[0], sources[0]), strict=True)
    cost: dict[str, int | float] = {"mask_slots": slots, "plain_steps": plain, "parallel_steps": parallel}
    for name, answers in (("chat", unforked), ("source", sources[slots]), ("thread", sequential)):
        tokens, steps = _tokens(answers), _steps(answers)
        cost |= {f"{name}_tokens": tokens, f"{name}_steps": steps, f"{name}_tokens_per_step": tokens / steps}
    return {**cost, "fewer_steps": plain / parallel, "changed": sum(text != original for text, original in pairs)}


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
def command(model: Path, questions: int, texts: int, threads: int) -> None:
    """Ask the demo model about functions of files that are held out of training, and print the results as JSON."""
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
            listed, short = split(corpus.held_out)
            functions = [*listed[:questions], *short[:questions]]
            results = evaluate(runtime, functions, corpus.held_out_texts[:texts], stage)
    show_json(results)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:], command))
