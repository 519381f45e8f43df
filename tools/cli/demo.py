"""`spaceport demo`: the whole way once: export a checkpoint, check it, decode plainly and with drafts."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import click

from spaceport.exporter.export import Options, export
from spaceport.exporter.quiet import quiet_libraries
from spaceport.graphs.faults import InputFault
from spaceport.runtime.admission import Prompt
from spaceport.runtime.bundle import open_bundle
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime
from spaceport.runtime.stream import Completion
from spaceport.tools.cli.check import FAILED, check
from spaceport.tools.cli.generate import show
from spaceport.tools.cli.screen import show_table, stages

PROMPTS_FILE = "prompts.json"
NOTE = "The model is tiny and its answers are templated: these numbers are no comparison with published ones."
MODEL = Path(__file__).parents[1] / "demo" / "model"
_LONG = 256  # tokens of the longest case that is checked


@click.command("demo")
@click.argument("checkpoint", type=click.Path(path_type=Path), default=MODEL, metavar="[CHECKPOINT]")
@click.option(
    "--prompt", "prompts", multiple=True, help="Prompt to decode; by default those in the checkpoint's prompts.json."
)
@click.option("--max-tokens", default=160, show_default=True, help="Most tokens to write.")
@click.option("--threads", default=1, show_default=True, metavar="N", help="Processor threads.")
def command(checkpoint: Path, prompts: tuple[str, ...], max_tokens: int, threads: int) -> int:
    """Export CHECKPOINT into a temporary folder, check it, and write texts plainly and with drafts.

    Without CHECKPOINT it is the model that comes along: two million weights that explain the parameters of Python
    functions, in templated answers, and continue Python source.
    """
    quiet_libraries()
    chosen: dict[str, Prompt] = {prompt[:20]: prompt for prompt in prompts}
    chosen = chosen or prompts_of(checkpoint)
    with tempfile.TemporaryDirectory(prefix="spaceport-demo-") as folder:
        bundle = Path(folder) / "bundle"
        with stages() as stage:
            export(checkpoint, bundle, Options(), stage=stage)
            findings = check(open_bundle(bundle), checkpoint, _LONG, "auto", threads, 0, False, stage)
        worst = max(findings, key=lambda finding: finding.max_error)
        click.echo(
            f"\nchecked: {len(findings)} kinds of calls, largest difference to PyTorch {worst.max_error:.1e} "
            f"(logits up to {worst.largest_logit:.0f}): {'passed' if all(findings) else 'FAILED'}\n"
        )
        with Runtime.open(bundle, threads=threads) as runtime:
            same = compare(runtime, chosen, max_tokens)
            if checkpoint == MODEL:
                click.echo(f"\n{NOTE}")
            name, prompt = next(iter(chosen.items()))
            click.echo(f"\n{name}, accepted drafts marked:\n{_shown(prompt)}", nl=False)
            show(runtime.stream(prompt, Decoding(max_tokens=max_tokens)), drafts=True)
    return 0 if same and all(findings) else FAILED


def compare(runtime: Runtime, prompts: dict[str, Prompt], max_tokens: int) -> bool:
    """The table of all prompts with every number of mask slots; whether all texts were the plain ones."""
    most = runtime.bundle.manifest.max_mask_slots
    rows: list[Sequence[object]] = []
    equal = True
    for name, prompt in prompts.items():
        plain, seconds = timed(runtime, prompt, max_tokens, 0)
        rows.append(
            (
                name,
                "plain",
                len(plain.tokens),
                plain.statistics.steps,
                plain.statistics.tokens_per_step,
                seconds * 1e3,
                "-",
            )
        )
        for slots in sorted({1, (most + 1) // 2, most} - {0}) if most else ():
            drafted, seconds = timed(runtime, prompt, max_tokens, slots)
            same = drafted.tokens == plain.tokens
            equal = equal and same
            found = drafted.statistics
            verdict = "the same" if same else "DIFFERENT"
            rows.append(
                (name, f"k = {slots}", len(drafted.tokens), found.steps, found.tokens_per_step, seconds * 1e3, verdict)
            )
    show_table("", ("text", "drafts", "tokens", "steps", "tokens a step", "ms", "text against plain"), rows)
    return equal


def timed(runtime: Runtime, prompt: Prompt, max_tokens: int, slots: int) -> tuple[Completion, float]:
    """A text and the shortest of three times that it took."""
    times, completions = [], []
    for _ in range(3):
        started = perf_counter()
        completions.append(runtime.generate(prompt, Decoding(max_tokens=max_tokens, mask_slots=slots)))
        times.append(perf_counter() - started)
    return completions[-1], min(times)


def prompts_of(checkpoint: Path) -> dict[str, Prompt]:
    """Named prompts that a checkpoint brings along: texts, or what a user says in a chat."""
    file = checkpoint / PROMPTS_FILE
    if not file.exists():
        raise InputFault(f"{checkpoint}: no {PROMPTS_FILE} in it: name a prompt with --prompt")
    try:
        found = json.loads(file.read_text("utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputFault(f"{file}: not JSON that can be read: {error}") from error
    prompts = {name: _prompt(told) for name, told in found.items()} if isinstance(found, dict) else {}
    if not prompts or not all(prompts.values()):
        raise InputFault(f'{file}: expected an object of names and prompts, each a text or {{"user": text}}')
    return prompts


def _prompt(told: Any) -> Prompt:
    """A prompt as a file tells it; an empty one if it is none."""
    if isinstance(told, dict) and list(told) == ["user"] and isinstance(told["user"], str) and told["user"]:
        return [{"role": "user", "content": told["user"]}]
    return told if isinstance(told, str) else ""


def _shown(prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    return "".join(f"{message['content']}\n" for message in prompt if not isinstance(message, int))
