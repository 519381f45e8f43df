"""Command line: the entry point `spaceport`, its commands and exit codes."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import click

from spaceport import __version__
from spaceport.graphs.contract.faults import InputFault, MissingDependency, OptionFault, SpaceportError
from spaceport.graphs.contract.installation import install_command

OK = 0
FAULT = 1  # a bug in Spaceport, or an error of the operating system
USAGE = 2  # invalid options
INPUT = 3  # invalid files or requests
ACCURACY = 4  # outputs differ by more than the tolerance
MISSING = 5  # a missing package, library or device
INTERRUPTED = 130

# Package -> the extra that installs it; all other packages are in `export`.
EXTRAS = {
    "onnxruntime": "cpu",
    "polygraphy": "check",
    "numpy": "",
    "tokenizers": "",
    **dict.fromkeys(("jinja2", "prompt_toolkit"), ""),
    **dict.fromkeys(("starlette", "uvicorn", "msgspec", "prometheus_client", "tomli"), "serve"),
    "accelerate": "tune",
    "peft": "tune",
}


def name_flags(message: str, command: click.Command | None) -> str:
    """A message of the runtime with the flags of a command in place of Python option names."""
    for option in command.params if command is not None else ():
        if not isinstance(option, click.Option) or option.name is None:
            continue
        name, flag = re.escape(option.name), option.opts[0]
        message = message.replace(f"{option.name} ({flag})", flag).replace(f"{option.name} ({flag}; ", f"{flag} (")
        message = re.sub(rf"(?<![\w.`(-]){name}='?([\w.-]+)'?", rf"{flag} \1", message)
        if "_" in name:
            message = re.sub(rf"(?<![\w.`-]){name}(?![\w=])", flag, message)
        else:  # may be a plain word elsewhere in the sentence
            message = re.sub(rf"^{name}(?= (?:is|holds) )", flag, message)
    return message


class LazyGroup(click.Group):
    """A group of commands in the modules of a package, which are imported when they are called, so that --help is fast."""

    package: ClassVar[str]
    summaries: ClassVar[Mapping[str, str]]  # name of a command and of its module -> its line in --help

    def list_commands(self, context: click.Context) -> list[str]:
        return list(self.summaries)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in self.summaries:
            return None
        command: click.Command = import_module(f"{self.package}.{name}").command
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the arguments; `help COMMAND` is `COMMAND --help`."""
        return super().parse_args(ctx, [*args[1:], "--help"] if args[:1] == ["help"] else args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that the arguments name; an unknown one is an error that names a similar one."""
        if not ctx.resilient_parsing and args[0] not in self.summaries and not args[0].startswith("-"):
            close = get_close_matches(args[0], self.summaries, 1)
            hint = f"did you mean {close[0]}?" if close else f"`{ctx.command_path} --help` lists the commands"
            raise click.UsageError(f"there is no command {args[0]}: {hint}", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, context: click.Context) -> Any:
        """Run a command; errors about options name its flags."""
        try:
            return super().invoke(context)
        except OptionFault as error:
            command = self.get_command(context, context.invoked_subcommand or "")
            raise OptionFault(name_flags(str(error), command)) from error

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section(f"Commands (`{context.command_path} COMMAND --help` shows their options)"):
            formatter.write_dl(list(self.summaries.items()))


class Commands(LazyGroup):
    """The commands of `spaceport`; --help fits on a screen."""

    package = "spaceport.tools.cli"
    summaries: ClassVar = {
        "tune": "Fine-tune a checkpoint for drafts and parallel threads.",
        "distill": "Generate a model's own answers to prompts, as training data.",
        "acceptance": "Measure draft acceptance rates.",
        "adopt": "Use published weights that draft for themselves.",
        "export": "Export a checkpoint to an ONNX bundle.",
        "build": "Build TensorRT engines from a bundle.",
        "check": "Compare the logits of all backends and of PyTorch.",
        "audit": "Verify that drafted output equals plain output.",
        "inspect": "Show the contents of a bundle.",
        "generate": "Generate text.",
        "chat": "Chat with a bundle on the terminal.",
        "serve": "Serve bundles with an OpenAI-compatible HTTP API.",
        "bench": "Run benchmarks.",
        "demo": "Export, check and benchmark a small model.",
        "doctor": "Show available backends and how to install missing ones.",
    }

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """The arguments in the line of usage, options included."""
        return ["[-h] [-V]", *super().collect_usage_pieces(ctx)[1:]]

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands; the line of usage has the options."""
        self.format_commands(context, formatter)


@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, "-V", "--version", prog_name="spaceport")
def cli() -> None:
    """Export language models to ONNX or TensorRT and run them with drafts."""


def main() -> None:
    """Run a command and exit with its exit code."""
    # Before torch is imported: its threads would spin while they wait for each other. Beside busy programs, a product of
    # matrices then takes 7 times the CPU time and 5 times as long on two cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with Path(os.devnull).open("r+") as null:  # stands in for streams that were closed before the program started
        sys.stdin, sys.stdout, sys.stderr = sys.stdin or null, sys.stdout or null, sys.stderr or null
        sys.exit(run(sys.argv[1:]))


def run(arguments: list[str], commands: click.Command = cli) -> int:
    """Run a command, of `spaceport` or of another group; its exit code."""
    try:
        result = commands.main(arguments, prog_name="spaceport" if commands is cli else None, standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except OptionFault as error:
        return _fail(error, USAGE)
    except InputFault as error:
        return _fail(error, INPUT)
    except MissingDependency as error:
        return _fail(error, MISSING)
    except SpaceportError as error:  # the engine failed, or the model's logits are no numbers
        return _fail(error, FAULT)
    except ModuleNotFoundError as error:
        return _missing(error, arguments)
    except (click.Abort, KeyboardInterrupt):
        click.echo("\nspaceport: interrupted", err=True)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of the pipe has gone: print nothing more, not even at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAULT
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename else error.strerror or error, FAULT)
    except Exception:  # noqa: BLE001  (everything else is a bug in spaceport: print the traceback)
        return _fault()
    return result if isinstance(result, int) else OK


def _fail(error: object, code: int) -> int:
    # Which of several processes that torchrun or accelerate has started this is
    rank = f"rank {os.environ.get('RANK')}: " if os.environ.get("WORLD_SIZE", "1") != "1" else ""
    click.echo(f"spaceport: {rank}{error}", err=True)
    return code


def _fault() -> int:
    traceback.print_exc()
    click.echo("\nspaceport: this is a bug in spaceport; please report it with the traceback above", err=True)
    return FAULT


def _missing(error: ModuleNotFoundError, arguments: list[str]) -> int:
    package = (error.name or "").partition(".")[0]
    if package in ("", "spaceport"):
        return _fault()
    extra = EXTRAS.get(package, "export")
    return _fail(
        f"`spaceport {arguments[0]}` needs the package {package}, which is not installed: {install_command(extra)}",
        MISSING,
    )
