"""Pages of the site: which source is which page, and where their links lead.

Not responsible for: how the pages look, nor for anchors (`make docs`).
"""

from __future__ import annotations

from pathlib import Path

import yaml

from tools.site import wire
from tools.site.__main__ import MADE
from tools.site.pages import converted, sources

PAGES = {"README.md": "index.md", "docs/a.md": "a.md", "docs/log/b.md": "log/b.md"}


def test_links_lead_to_pages_or_to_the_repository() -> None:
    text = "[a](../a.md#x), [home](../../README.md), [here](#y), [web](https://example.com), [code](../../c/d.py#L1)"
    links = "[a](../a.md#x), [home](../index.md), [here](#y), [web](https://example.com), "
    assert converted(text, "docs/log/b.md", PAGES, "https://x/blob/main").endswith(
        f"{links}[code](https://x/blob/main/c/d.py)"
    )
    assert converted(text, "docs/log/b.md", PAGES, "").endswith(f"{links}code")


def test_a_fence_keeps_its_language_and_its_text() -> None:
    text = "See [a](docs/a.md).\n\n```bash serve\n[x](docs/a.md)\n```\n\n```\ny\n```\n"
    assert converted(text, "README.md", PAGES, "") == (
        "See [a](a.md).\n\n```bash\n[x](docs/a.md)\n```\n\n```text\ny\n```\n"
    )


def test_every_page_has_its_place_in_the_menu(root: Path) -> None:
    class Loader(yaml.SafeLoader):
        """Passes over the tags of MkDocs."""

    Loader.add_multi_constructor("", lambda loader, suffix, node: None)
    menu = yaml.load((root / "mkdocs.yml").read_text(encoding="utf-8"), Loader)["nav"]
    listed = [page for part in menu for pages in part.values() for page in pages]
    listed = [next(iter(page.values())) if isinstance(page, dict) else page for page in listed]
    assert sorted(listed) == sorted([*(page for page in sources(root).values() if page.endswith(".md")), *MADE])


def test_the_reference_has_methods_and_fields_with_their_types(root: Path) -> None:
    page = wire.page(root, "protos/engine/v1/engine.proto", "The gRPC API")
    assert "### Generate\n\n[GenerateRequest](#generaterequest) to stream [GenerateResponse]" in page
    for field in ("`cache_salt` | string", "`lora` | string", "repeated [LogitsProcessor](#logitsprocessor)"):
        assert field in page
