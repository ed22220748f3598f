"""A hook of mkdocs: replaces links to files outside this folder, which are not part of the site, by their names."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]


def on_page_markdown(markdown: str, **_) -> str:
    def name(match: re.Match) -> str:
        path = match[2].partition("#")[0]
        if not (ROOT / path).exists():
            raise FileNotFoundError(f"a page links to {path}, which is not there")
        return match[1]

    return re.sub(r"\[([^\]]+)\]\(\.\./([^)]+)\)", name, markdown)
