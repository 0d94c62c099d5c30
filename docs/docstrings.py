"""Docstrings as Markdown: they are written for readers of the source, in the manner of torch's own."""

import re
import textwrap
from typing import Any

import griffe


class Docstrings(griffe.Extension):
    """Turns roles, literal blocks and simple tables of reStructuredText into Markdown."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Called for the top, whose page has a beginning of its own."""
        pkg.docstring = None

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each object, once it is loaded."""
        if obj.docstring is not None:
            text = obj.docstring.value
            # What a module lists next, its page shows.
            obj.docstring.value = as_markdown(text.split("\n\n")[0] if obj.is_module else text)


def as_markdown(text: str) -> str:
    """The same text, where Markdown would show it otherwise."""
    text = re.sub(r":(?:func|class|meth|mod|attr|data):`([^`]*)`", r"`\1`", text)
    text = re.sub(r"^( *)Example::\n((?:\n|\1    .*(?:\n|\Z))+)", _highlighted, text, flags=re.MULTILINE)
    text = re.sub(r"::$", ":", text, flags=re.MULTILINE)
    return re.sub(
        r"^=+(?:  =+)+\n(?:.+\n)+?=+(?:  =+)+\n(?:.+\n)+?=+(?:  =+)+$", _indented, text, flags=re.MULTILINE
    )


def _highlighted(match: re.Match[str]) -> str:
    fenced = f"**Example**\n\n```python\n{textwrap.dedent(match[2]).strip()}\n```\n\n"
    return textwrap.indent(fenced, match[1])


def _indented(match: re.Match[str]) -> str:
    return "\n".join(f"    {line}" for line in match[0].splitlines())
