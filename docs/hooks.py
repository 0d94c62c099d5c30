"""What MkDocs does not find by itself: pages and pictures outside of docs/, and what docs/interop has."""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
ELSEWHERE = {
    "benchmarks.md": "bench/README.md",
    "claims/README.md": "bench/claims/README.md",
    "contributing.md": "CONTRIBUTING.md",
    **{
        f"pictures/{path.name}": f"bench/pictures/{path.name}"
        for path in (ROOT / "bench/pictures").glob("*.svg")
    },
}


def on_config(config: Any) -> Any:
    """List what lies in docs/interop: the table of all first, then in the order of file names."""
    names = [path.name for path in Path(config.docs_dir, "interop").glob("*.md")]
    pages = sorted(names, key=lambda name: (name != "index.md", name))
    if pages:
        config.nav.insert(3, {"Integrations": [f"interop/{page}" for page in pages]})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add what stands outside of docs/, where it is also read as a file."""
    for target, source in ELSEWHERE.items():
        files.append(File.generated(config, target, abs_src_path=str(ROOT / source)))
    return files
