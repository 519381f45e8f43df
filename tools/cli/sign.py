"""`spaceport sign`: sign a bundle, or create a key pair."""

from __future__ import annotations

from pathlib import Path

import click

from spaceport.exporter.bundle_manifest import PRIVATE_FILE, PUBLIC_FILE, sign_manifest, write_key_pair
from spaceport.graphs.contract.ed25519 import read_private_key
from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.bundle import open_bundle
from spaceport.tools.cli.options import PATH


@click.command("sign")
@click.argument("bundle", type=PATH, required=False)
@click.option("--key", "key_file", type=PATH, metavar="PRIVATE_KEY", help="Sign with this Ed25519 key (PEM).")
@click.option("--new-key", type=PATH, metavar="FOLDER", help="Instead, create a key pair in this folder.")
def command(bundle: Path | None, key_file: Path | None, new_key: Path | None) -> None:
    """Verify the files of BUNDLE and sign its manifest, which has the SHA-256 of every file.

    Bundles are opened with --require-signature PUBLIC_KEY to refuse those that are not signed with the key.
    """
    if new_key is not None:
        if bundle is not None or key_file is not None:
            raise OptionFault("--new-key creates a key pair and signs nothing: leave BUNDLE and --key out")
        public = write_key_pair(new_key)
        click.echo(f"{new_key / PRIVATE_FILE}: private key, keep it secret")
        click.echo(f"{new_key / PUBLIC_FILE}: public key {public.fingerprint}")
        return
    if bundle is None or key_file is None:
        lacking = "no BUNDLE" if bundle is None else "no --key"
        raise OptionFault(f"{lacking}: expected BUNDLE with --key PRIVATE_KEY, or --new-key FOLDER")
    key = read_private_key(key_file)
    opened = open_bundle(bundle)
    sign_manifest(bundle, opened.manifest_content, key)
    click.echo(f"{bundle}: signed with key {key.public.fingerprint}")
