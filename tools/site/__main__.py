"""Writes the pages of the site into a folder, for MkDocs: `python -m tools.site DIR`."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from gpu_engine.ops.installation import installed_version
from http_gateway.http.openapi import document
from tools.site import wire
from tools.site.pages import converted, sources

MADE: dict[str, Callable[[Path], str]] = {
    "client_api.md": lambda root: "# The Python client's API\n\n::: lockstep_client\n",
    "endpoints.md": lambda root: "# Fields of the HTTP API\n\n[OAD(openapi.json)]\n",
    "wire.md": lambda root: wire.page(root, "protos/engine/v1/engine.proto", "The gRPC API"),
}
"""Pages without a source of their own. mkdocstrings puts the client's docstrings, and neoteroi.mkdocsoad the OpenAPI
document, in place of the last lines of the first two."""
ROOT = Path(__file__).resolve().parents[2]


def write(root: Path, folder: Path, repository: str) -> None:
    """Write the pages of the checkout `root` into `folder`, which is emptied.

    Args:
        repository: address of the files of the checkout, such as `https://github.com/a/b/blob/main`; "" if unknown.
    """
    shutil.rmtree(folder, ignore_errors=True)
    pages = sources(root)
    for source, page in pages.items():
        (folder / page).parent.mkdir(parents=True, exist_ok=True)
        if source.endswith(".md"):
            text = (root / source).read_text(encoding="utf-8")
            (folder / page).write_text(converted(text, source, pages, repository), encoding="utf-8")
        else:
            shutil.copyfile(root / source, folder / page)
    for page, made in MADE.items():
        (folder / page).write_text(made(root), encoding="utf-8")
    (folder / "openapi.json").write_text(
        json.dumps(document(installed_version(), keys=True), indent=1), encoding="utf-8"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the pages."""
    parser = argparse.ArgumentParser(prog="python -m tools.site", description="Write the pages of the site into DIR.")
    parser.add_argument("dir", metavar="DIR", type=Path, help="written anew")
    parser.add_argument("--repository", default="", metavar="URL", help="address of the checkout's files")
    options = parser.parse_args(arguments)
    write(ROOT, options.dir, options.repository)
    return 0


if __name__ == "__main__":
    sys.exit(main())
