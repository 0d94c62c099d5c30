"""The README as a package index shows it: there, links into the repository and its pictures lead nowhere.

All else stands in pyproject.toml.
"""

import re
from pathlib import Path

from setuptools import setup


def without_relative_links(markdown: str) -> str:
    """Leave out pictures that lie beside the text, and keep of links only what they say."""
    markdown = re.sub(r"!\[[^]]*\]\((?!https?:)[^)]*\)\n*", "", markdown)
    return re.sub(r"\[([^]]*)\]\((?!https?:)[^)]*\)", r"\1", markdown)


if __name__ == "__main__":
    readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    setup(
        long_description=without_relative_links(readme),
        long_description_content_type="text/markdown",
    )
