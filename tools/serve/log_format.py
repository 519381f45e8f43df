"""Log format: log entries as lines of text or JSON, with the id of the request and without messages of unknown errors."""

from __future__ import annotations

import json
import logging
import sys
import traceback
from datetime import datetime, timezone
from typing import Any

from spaceport.runtime.engine import EngineFault
from spaceport.tools.serve.request_record import current


class _Lines(logging.Formatter):
    """Entries whose errors have their stack, but no message: it may quote text of a request."""

    def formatException(self, ei: Any) -> str:
        """The stack and type of an error and of its causes."""
        error: BaseException | None = ei[1]
        found = []
        while error is not None:
            message = f": {error}" if isinstance(error, EngineFault) else ""
            found.append("".join(traceback.format_tb(error.__traceback__)) + type(error).__name__ + message)
            error = error.__cause__
        return "\ncaused by\n".join(found)


class TextLines(_Lines):
    """Entries as lines of text, with their fields as name=value."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line without an error."""
        fields = " ".join(f"{name}={value}" for name, value in _fields(record).items())
        return f"{super().formatMessage(record)} {fields}".rstrip()


class JsonLines(_Lines):
    """Entries as JSON objects, one per line."""

    def format(self, record: logging.LogRecord) -> str:
        """The entry as a line."""
        entry = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


def configure_logging(form: str, level: str) -> None:
    """Write the entries of this process to stderr; debug entries are those of Spaceport only."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    logging.basicConfig(level=max(logging.INFO, logging.getLevelName(level.upper())), handlers=[handler], force=True)
    logging.getLogger("spaceport").setLevel(level.upper())


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    request = current.get()
    given: dict[str, Any] = getattr(record, "fields", {})
    return given if request is None else {"id": request.id, **given}
