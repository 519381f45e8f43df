"""Recipes as a command: `python -m recipes chat|coder WORK --base MODEL.gguf`.

Each is a list of `spaceport` commands. One whose result is in WORK is not run again, so a recipe continues where it stopped.
"""

from __future__ import annotations

import json
import sys
import unicodedata
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click

from spaceport.runtime import Decoding, Runtime, Sampling
from spaceport.tools import cli

LIST = "List five facts about {}. Number the items; each has a title, a colon and one sentence."  # the answers fork
CODER_PROMPTS = Path(__file__).parent / "coder" / "prompts.jsonl"
_TRAINING = "--method gated-lora --adapter-only --bf16 --batch-size 4 --micro-batch-size 2"
_DRAFTS = (
    "--mask-slots 4 --correction-rank 64 --drop-rate 0.3 --rank 32 --alpha 64 --target o_proj --target down_proj "
    "--epochs 12 --learning-rate 1e-3"
)
_CLIENTS = 48  # prompts that are sampled at the same time


@click.group(help="Train an adapter of the chat or the coding model with the public commands of Spaceport.")
def recipes() -> None: ...


_PATH = click.Path(path_type=Path)
_work = click.argument("work", type=_PATH)
_trial = click.option(
    "--trial", is_flag=True, help="Few samples and two training steps, to see that each command works."
)


_base = click.option("--base", type=_PATH, required=True, help="GGUF file or checkpoint of the base model.")


@recipes.command()
@_work
@_base
@click.option("--hours", default=4.0, show_default=True, help="Training time.")
@click.option("--answers", is_flag=True, help="End when the answers are written, to train on another machine.")
@_trial
def coder(work: Path, base: Path, hours: float, answers: bool, trial: bool) -> None:
    """Train an adapter for a coding model on its own answers to written prompts, greedy and sampled."""
    work.mkdir(parents=True, exist_ok=True)
    bundle, adapter = work / "base.bundle", work / "adapter"
    lines = CODER_PROMPTS.read_text("utf-8").splitlines(True)[: 40 if trial else None]
    asked = {"validation": lines[::20], "train": [line for number, line in enumerate(lines) if number % 20]}
    _make(bundle, "export", base, bundle)
    for name, of, temperature in (("validation", "validation", 0), ("train", "train", 0), ("sampled", "train", 0.8)):
        _answer(bundle, work, name, asked[of], f"--max-tokens {8 if trial else 200} --temperature {temperature}")
    if answers:
        return
    data = f"--cutoff 640 --anchors 128 --time-budget {round(60 * hours)}m {work / 'sampled.jsonl'}"
    _train(base, adapter, work / "train.jsonl", f"{_DRAFTS} {data}", work, trial)
    _spaceport("acceptance", base, work / "validation.jsonl", "--adapter", adapter, "--save", "--max-tokens", 96)


@recipes.command()
@_work
@_base
@click.option("--prompts", default=4500, show_default=True, help="Prompts that the base model writes itself.")
@_trial
def chat(work: Path, base: Path, prompts: int, trial: bool) -> None:
    """Train an adapter for a chat model on its own answers to its own prompts: some hours on two CPU cores."""
    work.mkdir(parents=True, exist_ok=True)
    bundle, drafts, adapter = work / "base.bundle", work / "drafts", work / "adapter"
    nouns = [
        unicodedata.name(chr(code)).lower() for code in range(0x1F330, 0x1F3F0)
    ]  # from chestnut to japanese castle
    _make(bundle, "export", base, bundle)
    texts = own_prompts(bundle, work / "own_prompts.json", prompts + 1 + prompts // 40)
    asked = {
        "train": texts[:prompts],
        "validation": texts[prompts:],
        "forks": [text for own, noun in zip(texts, nouns, strict=False) for text in (own, LIST.format(noun))],
    }
    for name, messages in asked.items():
        lines = [json.dumps({"prompt": text}) + "\n" for text in messages]
        _answer(bundle, work, name, lines, f"--max-tokens {400 if name == 'forks' else 160}")
    data = "--cutoff 768 --anchors 160 --time-budget 96m"
    _train(base, drafts, work / "train.jsonl", f"{_DRAFTS} {data}", work, trial)
    forks = f"--objective apar --adapter {drafts} --unfork-rate 0.05 --epochs 6 --learning-rate 5e-2 --time-budget 12m"
    _train(base, adapter, work / "forks.jsonl", f"{forks} --cutoff 768", work, trial)
    _spaceport("acceptance", base, work / "validation.jsonl", "--adapter", adapter, "--save", "--max-tokens", 96)


def own_prompts(bundle: Path, file: Path, wanted: int) -> list[str]:
    """What the model itself writes where a user's message stands, at temperature 1: far more varied than templates."""
    if file.exists():
        return list(json.loads(file.read_text("utf-8")))
    texts: dict[str, None] = {}
    with Runtime.open(bundle, max_seq_len=1024, max_requests=_CLIENTS) as runtime, ThreadPoolExecutor(_CLIENTS) as pool:
        one, other = (runtime.tokens_of([{"role": "user", "content": text}]) for text in ("a", "1"))
        opening = one[: next(index for index, pair in enumerate(zip(one, other, strict=False)) if len({*pair}) > 1)]

        def message(seed: int) -> str:
            sampling = Sampling(temperature=1.0, top_p=0.95, seed=seed)
            completion = runtime.generate(opening, Decoding(max_tokens=90, sampling=sampling))
            return completion.text.strip() if completion.ending == "end" else ""

        for first in range(0, 64 * wanted, _CLIENTS):
            texts |= dict.fromkeys(text for text in pool.map(message, range(first, first + _CLIENTS)) if len(text) > 11)
            if len(texts) >= wanted:
                break
        else:
            raise click.ClickException(f"{bundle}: wrote {len(texts)} prompts, expected {wanted}: lower --prompts")
    file.write_text(json.dumps(list(texts)[:wanted]), "utf-8")
    return list(texts)[:wanted]


def _answer(bundle: Path, work: Path, name: str, lines: Sequence[str], options: str) -> None:
    """Let the model answer the prompts in these lines, in WORK/NAME.jsonl."""
    prompts, answers = work / f"{name}_prompts.jsonl", work / f"{name}.jsonl"
    prompts.write_text("".join(lines), "utf-8")
    _make(answers, "distill", bundle, prompts, answers, *options.split())


def _train(base: Path, target: Path, data: Path, options: str, work: Path, trial: bool) -> None:
    more = [*f"{_TRAINING} {options}".split(), "--validation", work / "validation.jsonl"]
    resumed = ["--resume"] if Path(f"{target}.training").exists() else []
    _make(target, "tune", base, target, data, *more, *(["--max-steps", 2] if trial else []), *resumed)


def _make(target: Path, *arguments: object) -> None:
    if not target.exists():
        _spaceport(*arguments)


def _spaceport(*arguments: object) -> None:
    words = [str(argument) for argument in arguments]
    click.echo(f"$ spaceport {' '.join(words)}")
    if code := cli.run(words):
        click.echo(f"spaceport {words[0]} ended with exit code {code}; the same command continues with it", err=True)
        sys.exit(code)


if __name__ == "__main__":
    recipes()
