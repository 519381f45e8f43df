"""Flag names: messages of the runtime with command-line flags in place of Python option names."""

from __future__ import annotations

import re

import click


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
