"""Container image: what deploy/Containerfile says, and its steps run in a fresh root where no image builder is.

    PYTHONPATH=tests python -m support.container_image

Builds the image `cpu` below build/image, runs its service with a read-only root and without privileges, asks it, and
prints the size. Needs root, Debian's packages through mmdebstrap, and the packages of the image from PyPI.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from support.exported import bundle_of
from support.paths import DEMO, DEPLOY, ROOT
from support.programs import free_port

_WAIT = 300.0  # seconds until a service that was started answers, or has ended
_STATE = "/var/lib/spaceport"
_MODELS = "/mnt/models"
_NOT_IN_SLIM = ("doc", "man", "info", "locale", "lintian")  # folders that Debian's slim images leave out
# Runs in a mount namespace of its own, so that nothing stays mounted. A root gets no file of this machine that it can change.
_MOUNTS = """set -e
root=$1; shift
mount -t tmpfs tmpfs "$root/dev"
ln -s /proc/self/fd "$root/dev/fd"
for device in null zero full random urandom; do
    touch "$root/dev/$device"
    mount --bind "/dev/$device" "$root/dev/$device"
done
read_only() {
    if [ -d "$1" ]; then mkdir -p "$root$2"; elif [ ! -e "$root$2" ]; then touch "$root$2"; fi
    mount --bind "$1" "$root$2"
    mount -o remount,bind,ro "$root$2"
}
read_only /proc /proc
"""


def stages() -> tuple[dict[str, str], list[tuple[str, str, str]], dict[str, str]]:
    """The parent of each stage of the file, all instructions with their stages, and the values of its arguments."""
    text = (DEPLOY / "Containerfile").read_text("utf-8")
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    parents, steps, arguments = dict[str, str](), list[tuple[str, str, str]](), dict[str, str]()
    for line in filter(None, re.sub(r"\\\n", " ", lines).splitlines()):
        kind, argument = line.split(None, 1)
        if kind == "FROM":
            parent, _, stage = argument.partition(" AS ")
            parents[stage] = parent
        elif parents:
            steps.append((stage, kind, " ".join(argument.split())))
        elif kind == "ARG":
            key, _, value = argument.partition("=")
            arguments[key] = value
    return parents, steps, arguments


def steps_of(target: str) -> list[tuple[str, str, str]]:
    """The instructions of an image behind those of the stages that it is made from: stage, kind, argument."""
    parents, steps, _ = stages()
    before = steps_of(parents[target]) if target in parents else []
    return [*before, *(step for step in steps if step[0] == target)]


def instructions(target: str) -> dict[str, list[str]]:
    """The instructions of an image with those of the stages that it is made from, by kind."""
    found: dict[str, list[str]] = {}
    for _, kind, argument in steps_of(target):
        found.setdefault(kind, []).append(argument)
    return found


def variables(target: str = "cpu") -> dict[str, str]:
    """The variables that an image sets."""
    words = [word for line in instructions(target)["ENV"] for word in shlex.split(line)]
    return dict(word.split("=", 1) for word in words)


def health_command() -> list[str]:
    """The command of the image's health check."""
    (check,) = instructions("cpu")["HEALTHCHECK"]
    found: list[str] = json.loads(check[check.index("[") :])
    return found


def is_ignored(path: str) -> bool:
    """Whether the context of the images lacks a file: the last line of .dockerignore that fits decides."""
    found = False
    for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines():
        pattern = line.removeprefix("!")
        if pattern.startswith("**/"):
            fits = any(fnmatchcase(part, pattern[3:]) for part in path.split("/"))
        else:
            fits = pattern == "*" or f"{path}/".startswith(f"{pattern}/")
        if fits and not line.startswith("#"):
            found = not line.startswith("!")
    return found


def _context() -> Iterator[str]:
    """The files of the checkout that the context of the images has."""
    for top in (path for path in ROOT.iterdir() if not is_ignored(path.name)):
        for file in [top] if top.is_file() else filter(Path.is_file, top.rglob("*")):
            if not is_ignored(path := str(file.relative_to(ROOT))):
                yield path


class Builder:
    """Builds stages as folders below a work folder."""

    def __init__(self, work: Path) -> None:
        self._work = work
        self._parents, _, self._arguments = stages()

    def build(self, name: str) -> Path:
        """The root of a stage, built if it is not there."""
        root = self._work / name.replace("/", "-").replace(":", "-")
        if root.exists():
            return root
        partial = root.with_name(f"{root.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        if name in self._parents:
            parent = self._parents[name]
            parent = self.build(self._arguments[parent[2:-1]] if parent.startswith("${") else parent)
            print(f"image: {name}", flush=True)
            subprocess.run(["cp", "-a", parent, partial], check=True)
            self._run_steps(name, partial)
        else:
            suite = name.rpartition(":")[2].removesuffix("-slim")
            print(f"image: Debian {suite}", flush=True)
            partial.mkdir(parents=True)
            left_out = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in _NOT_IN_SLIM]
            subprocess.run(["mmdebstrap", "--quiet", "--variant=minbase", *left_out, suite, partial], check=True)
        partial.rename(root)
        return root

    def _run_steps(self, name: str, root: Path) -> None:
        environment, folder = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}, "/"
        for stage, kind, argument in steps_of(name):
            if kind == "ENV":  # what a stage sets holds in those that are made from it
                environment |= dict(word.split("=", 1) for word in shlex.split(argument))
            elif kind == "WORKDIR":
                folder = argument
                (root / folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
            elif kind == "ARG" and stage == name:
                environment[argument] = self._arguments[argument]
            elif kind == "COPY" and stage == name:
                self._copy(argument.split(), root, folder)
            elif kind == "RUN" and stage == name:
                _run(root, f"cd {folder} && {argument}", environment)

    def _copy(self, words: Sequence[str], root: Path, folder: str) -> None:
        *options, target = words
        from_stage = options[0].partition("=")[2] if options[0].startswith("--from=") else None
        target_path = root / str(Path(folder, target)).lstrip("/")
        target_path.mkdir(parents=True, exist_ok=True)
        for source in options[1:] if from_stage else options:
            if from_stage:
                subprocess.run(["cp", "-a", f"{self.build(from_stage)}{source}/.", target_path], check=True)
            elif source == ".":
                for path in _context():
                    (target_path / path).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(ROOT / path, target_path / path)
            else:
                shutil.copy(ROOT / source, target_path)


def _without_ours(values: dict[str, str]) -> list[str]:
    """The beginning of a command that runs with these variables only."""
    return ["env", "-i", *(f"{name}={value}" for name, value in values.items())]


def _run(root: Path, command: str, environment: dict[str, str]) -> None:
    """Run a command in a root, with the network and the pip settings of this machine."""
    ours = {name: value for name, value in os.environ.items() if name.startswith("PIP_") or "proxy" in name.lower()}
    script = f"""{_MOUNTS}
read_only /etc/resolv.conf /etc/resolv.conf
mount -t tmpfs tmpfs "$root/run"
"""
    for name, value in ours.items():
        if value.startswith("/") and Path(value).exists():
            script += f"read_only {shlex.quote(value)} /run/{name}\n"
            ours[name] = f"/run/{name}"
    words = [*_without_ours(ours | environment), "/bin/sh", "-c", command]
    script += 'exec chroot "$root" "$@"'
    subprocess.run(["unshare", "--mount", "sh", "-c", script, "sh", root, *words], stdin=subprocess.DEVNULL, check=True)


def _service(root: Path, bundle: Path, port: int) -> subprocess.Popen[str]:
    """The service of an image, as its user, with a read-only root and one folder that it may write to."""
    (user,) = instructions("cpu")["USER"]
    uid, gid = user.split(":")
    entry = json.loads(instructions("cpu")["ENTRYPOINT"][0])
    # The root is mounted on itself first: what is mounted below it before that would be hidden.
    script = f"""root=$1
mount --bind "$root" "$root"
{_MOUNTS}
mount -t tmpfs -o mode=1777,size=64m tmpfs "$root{_STATE}"
read_only "$1" {_MODELS}; shift
mount -o remount,bind,ro "$root"
exec chroot "$root" setpriv --reuid {uid} --regid {gid} --clear-groups --no-new-privs --bounding-set=-all "$@"
"""
    settings = variables() | {"SPACEPORT_PORT": str(port), "SPACEPORT_HOST": "127.0.0.1"}
    words = [*_without_ours(settings), *entry, f"chat={_MODELS}"]
    return subprocess.Popen(["unshare", "--mount", "sh", "-c", script, "sh", root, bundle, *words], text=True)


def check(root: Path, bundle: Path) -> None:
    """Raise unless the service of an image starts, answers, has no privileges, writes nothing and ends when it is told."""
    port = free_port()
    with _service(root, bundle, port) as process:
        try:
            probe = [sys.executable, *health_command()[1:]]
            end = time.monotonic() + _WAIT
            while subprocess.run(probe, env={"SPACEPORT_PORT": str(port)}, capture_output=True, check=False).returncode:
                assert process.poll() is None, "the service ended"
                assert time.monotonic() < end, "the service is not ready"
                time.sleep(0.5)
            body = json.dumps({"prompt": "import json\n", "max_tokens": 8}).encode()
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body, headers)
            answer = json.load(urllib.request.urlopen(request, timeout=60))
            assert answer["usage"]["completion_tokens"] > 0, answer
            fields = dict(line.split(":\t") for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
            assert fields["Uid"].split() == [instructions("cpu")["USER"][0].split(":")[0]] * 4, fields["Uid"]
            assert {fields[name] for name in ("CapEff", "CapBnd")} == {"0" * 16}, fields
            mounts = Path(f"/proc/{process.pid}/mountinfo").read_text().splitlines()
            (options,) = (line.split()[5] for line in mounts if line.split()[4] == "/")
            assert "ro" in options.split(","), options
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(_WAIT) == 0, process.returncode


def size_of(root: Path) -> int:
    """Bytes of the files of a root; a file with several names counts once."""
    files = (os.lstat(Path(folder, name)) for folder, _, names in os.walk(root) for name in names)
    return sum({(file.st_dev, file.st_ino): file.st_size for file in files}.values())


def main() -> None:
    """Build the image `cpu` and check it with the demo model."""
    if os.geteuid():
        raise SystemExit("got another user, expected root: it creates roots and mounts")
    if shutil.which("mmdebstrap") is None:
        raise SystemExit("got no mmdebstrap, expected it on the path: apt-get install mmdebstrap")
    root = Builder(ROOT / "build" / "image").build("cpu")
    check(root, bundle_of(DEMO))
    print(f"image: cpu starts and answers with a read-only root as user 10001; {size_of(root) / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
