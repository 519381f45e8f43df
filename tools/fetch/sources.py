"""Sources: the files of a bundle at an address, read in parts."""

from __future__ import annotations

import http.client
import io
import re
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import IO, Any, Protocol
from urllib.parse import quote, urlsplit

from spaceport.graphs.contract.faults import InputFault, MissingDependency, OptionFault
from spaceport.graphs.contract.installation import install_command

_TIMEOUT = 60.0  # seconds in which a web server sends nothing
# Bytes per second that a web server must send on a connection, on average over so many seconds from its first byte on
_LEAST_RATE, _WINDOW = 1024, 60.0
_TRANSIENT = (408, 425, 429)  # statuses that another attempt may not get; and all from 500


class FetchError(InputFault):
    """A bundle cannot be fetched from its address; the message says what was found and what to do."""


class FetchSource(Protocol):
    """Where the files of a bundle are read; several threads may read at the same time."""

    def read(self, name: str, start: int, stop: int) -> bytes:
        """The bytes of a file from `start` to `stop`, or to its end if that comes before.

        Raises FileNotFoundError for a file that does not exist, PermissionError for one that may not be read, FetchError
        if another attempt would fail too, and other errors of OSError if it may succeed.
        """


def open_source(address: str) -> FetchSource:
    """The files at an address: a folder, `https://`, or an object store such as `s3://`."""
    parts = urlsplit(address)
    if "://" not in address or parts.scheme == "file":
        return FolderSource(Path(parts.path if parts.scheme == "file" else address))
    if parts.scheme in ("http", "https"):
        return HttpSource(_without_query(address))
    return ObjectStoreSource(address.rstrip("/"), _object_store(address))


@dataclass(frozen=True)
class FolderSource:
    """The files of a folder, such as one on a network file system."""

    folder: Path

    def read(self, name: str, start: int, stop: int) -> bytes:
        """The bytes of a file from `start` to `stop`."""
        file = self.folder / name
        if file.exists() and not file.is_file():
            raise FetchError(f"{file}: expected a regular file")
        with file.open("rb") as stream:
            stream.seek(start)
            return stream.read(stop - start)


@dataclass(frozen=True)
class HttpSource:
    """The files below a URL of a web server that answers requests for ranges, as nearly all do."""

    url: str

    def read(self, name: str, start: int, stop: int) -> bytes:
        """The bytes of a file from `start` to `stop`; no more are received."""
        headers = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        request = urllib.request.Request(f"{self.url}/{quote(name)}", headers=headers)
        try:
            with _opener.open(request, timeout=_TIMEOUT) as response:
                if response.status != 206 and start:
                    raise FetchError(
                        f"{request.full_url}: the server sends the whole file instead of a range: expected one that answers "
                        "requests with Range, such as nginx or an object store"
                    )
                if response.status == 206 and _first_byte(response.headers) != start:
                    raise FetchError(f"{request.full_url}: the server sends another range than the one asked for")
                return _exactly(response, stop - start, request.full_url)
        except urllib.error.HTTPError as error:
            with error:
                raise _status_error(request.full_url, error.code, error.reason) from error
        except urllib.error.URLError as error:  # such as a refused connection
            raise ConnectionError(f"{request.full_url}: {error.reason}") from error
        except http.client.HTTPException as error:  # such as a connection that ends early
            raise ConnectionError(f"{request.full_url}: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class ObjectStoreSource:
    """The files below a prefix of an object store; the library tries again by itself."""

    address: str
    store: Any  # obstore.store.ObjectStore

    def read(self, name: str, start: int, stop: int) -> bytes:
        """The bytes of a file from `start` to `stop`; no more are received."""
        import obstore
        from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

        content = bytearray()
        try:
            for chunk in obstore.get(self.store, name, options={"range": (start, stop)}).stream():
                content += bytes(chunk)
                if len(content) > stop - start:
                    raise FetchError(
                        f"{self.address}/{name}: more bytes came than the {stop - start} that were asked for"
                    )
        except (PermissionDeniedError, UnauthenticatedError) as error:
            raise PermissionError(13, _first_line(error), name) from error
        except BaseError as error:
            raise FetchError(f"{self.address}/{name}: {_first_line(error)}") from error
        return bytes(content)


class _Metered(io.RawIOBase):
    """What a web server sends, head and body, as long as it does not come slower than the lowest rate."""

    def __init__(self, stream: io.RawIOBase) -> None:
        self._stream = stream
        self._began: float | None = None  # None: nothing has come
        self._received = 0  # since then

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        count = self._stream.readinto(buffer)
        now = time.monotonic()
        self._began = now if self._began is None else self._began
        self._received += count or 0
        if (seconds := now - self._began) >= _WINDOW:
            if self._received < _LEAST_RATE * seconds:
                raise TimeoutError(
                    f"{self._received} bytes came in {seconds:.0f} s: expected at least {_LEAST_RATE} bytes per second"
                )
            self._began, self._received = now, 0
        return count

    def close(self) -> None:
        self._stream.close()
        super().close()


class _Response(http.client.HTTPResponse):
    """A response whose stream is metered."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.fp = io.BufferedReader(_Metered(self.fp.detach()))


class _HttpConnection(http.client.HTTPConnection):
    response_class = _Response


class _HttpsConnection(http.client.HTTPSConnection):
    response_class = _Response


class _HttpHandler(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_HttpConnection, req)


class _HttpsHandler(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_HttpsConnection, req)


class _SecureRedirects(urllib.request.HTTPRedirectHandler):
    """Redirects to http and https only, and not from https to http."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        fp.close()  # not read: it might have no end
        allowed = ("https",) if urlsplit(req.full_url).scheme == "https" else ("http", "https")
        if urlsplit(newurl).scheme not in allowed:
            raise FetchError(
                f"{req.full_url}: is redirected to {newurl}: expected an address that stays with {' or '.join(allowed)}"
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)


_opener = urllib.request.build_opener(_HttpHandler, _HttpsHandler, _SecureRedirects)


def _without_query(address: str) -> str:
    parts = urlsplit(address)
    if parts.query or parts.fragment or not parts.hostname or "@" in parts.netloc:
        raise OptionFault(
            f"{address!r}: expected a URL such as https://HOST/PATH, without query and password: names of files are appended"
        )
    return address.rstrip("/")


def _object_store(address: str) -> Any:
    """The object store at an address; credentials and endpoints come from the environment."""
    try:
        from obstore.exceptions import BaseError
        from obstore.store import from_url
    except ImportError as error:
        raise MissingDependency(
            f"{address}: object stores need the package obstore: {install_command('storage')}"
        ) from error
    try:
        return from_url(address)
    except (BaseError, ValueError) as error:
        raise OptionFault(
            f"{address!r}: {_first_line(error)}: expected a folder, https://… or an object store such as s3://BUCKET/PATH"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _exactly(response: http.client.HTTPResponse, most: int, url: str) -> bytes:
    """The body of a response, at most these bytes of it."""
    announced = response.length  # None: the server does not say
    content = response.read(most)
    if announced is not None and len(content) < min(announced, most):
        raise ConnectionError(f"{url}: the connection ended after {len(content)} of {min(announced, most)} bytes")
    return content


def _first_byte(headers: Message) -> int | None:
    found = re.match(r"bytes (\d+)-", headers.get("Content-Range", ""))
    return None if found is None else int(found[1])


def _status_error(url: str, status: int, reason: str) -> Exception:
    message = f"{url}: {status} {reason}"
    if status in (404, 410):
        return FileNotFoundError(2, message, url)
    if status in (401, 403, 407):
        return PermissionError(13, message, url)
    if status in _TRANSIENT or status >= 500:
        return ConnectionError(message)
    return FetchError(f"{message}: expected a file")
