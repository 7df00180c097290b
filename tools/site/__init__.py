"""The site of the documentation: `make docs` builds it.

`python -m tools.site DIR` writes the pages into a folder, from which MkDocs makes the site (mkdocs.yml). The pages of
`docs/` and a few files elsewhere are the sources; two pages of the reference are made from the protos and from the
gateway's OpenAPI document.
"""
