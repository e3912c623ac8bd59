"""Takes the Python out of a page, so that what is shown is what is run."""

from __future__ import annotations

import sys
from types import ModuleType

from docs_commands import ROOT, blocks


def example(page: str, name: str, count: int | None = None) -> ModuleType:
    """The first `count` Python blocks of a page (all, if not given), as one module."""
    text = (ROOT / "docs" / page).read_text()
    parts = [block for block in blocks(text) if block.language == "python"][:count]
    source = "\n" * (parts[0].line - 1) + "\n".join(line for part in parts for line in part.lines)
    module = ModuleType(name)
    module.__file__ = str(ROOT / "docs" / page)
    sys.modules[name] = module
    exec(compile(source, module.__file__, "exec"), module.__dict__)
    return module
