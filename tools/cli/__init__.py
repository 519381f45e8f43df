"""Command line: the commands that people run; each in a module of its own that is imported when it is called."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import ClassVar

import click

from spaceport import __version__
from spaceport.graphs.contract.faults import InputFault, MissingDependency, OptionFault
from spaceport.tools.cli.exit_codes import FAULT, INPUT, INTERRUPTED, MISSING, OK, USAGE
from spaceport.tools.cli.lazy import LazyGroup

# What brings a package; all others come with [export].
EXTRAS = {
    "onnxruntime": "[cpu]",
    "numpy": "",
    "tokenizers": "",
    "jinja2": "",
    "accelerate": "[tune]",
    "peft": "[tune]",
    "matplotlib": "[tune]",
}


class Commands(LazyGroup):
    """The commands of `spaceport`."""

    package = "spaceport.tools.cli"
    summaries: ClassVar = {
        "tune": "Teach a checkpoint to draft for itself and to fork.",
        "acceptance": "Measure what a model's drafts are worth.",
        "export": "Write a checkpoint as a bundle.",
        "build": "Build a bundle for a GPU with TensorRT.",
        "check": "Compare all engines of a bundle, pair by pair.",
        "audit": "Hold a bundle's drafted texts against its plain ones.",
        "inspect": "Show what a bundle holds.",
        "plan": "Show what steps cost here, and the drafts that pay.",
        "generate": "Write text from a prompt.",
        "bench": "Measure what steps cost.",
        "demo": "Export, check and decode a small model.",
        "doctor": "Show which backends are here and what is missing.",
    }


@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="spaceport")
def cli() -> None:
    """Export language models that draft for themselves, and run them: the same text in fewer steps."""


def main() -> None:
    """Run a command and end the process with the code that its outcome has."""
    with Path(os.devnull).open("r+") as nowhere:  # for streams that were closed before the program began
        sys.stdin, sys.stdout, sys.stderr = sys.stdin or nowhere, sys.stdout or nowhere, sys.stderr or nowhere
        sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run a command; the exit code."""
    try:
        result = cli.main(arguments, prog_name="spaceport", standalone_mode=False)
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
    except ModuleNotFoundError as error:
        return _lacking(error, arguments)
    except (click.Abort, KeyboardInterrupt):
        click.echo("\nspaceport: interrupted", err=True)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe went away: nothing is left to say, not even at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAULT
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename else error.strerror or error, FAULT)
    except Exception:  # noqa: BLE001  (whatever is left is a fault of ours: say so, with all that is known of it)
        return _fault()
    return result if isinstance(result, int) else OK


def _fail(error: object, code: int) -> int:
    click.echo(f"spaceport: {error}", err=True)
    return code


def _fault() -> int:
    traceback.print_exc()
    click.echo("\nspaceport: this is a fault in spaceport itself; please report it with the lines above", err=True)
    return FAULT


def _lacking(error: ModuleNotFoundError, arguments: list[str]) -> int:
    package = (error.name or "").partition(".")[0]
    if package in ("", "spaceport"):
        return _fault()
    extra = EXTRAS.get(package, "[export]")
    return _fail(
        f"`spaceport {arguments[0]}` needs the package {package}, which is not installed: pip install 'spaceport{extra}'",
        MISSING,
    )
