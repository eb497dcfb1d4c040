"""Reads the documents of the older systems, and prepares their code to run on stageline.

The documents are no part of this project. They lie beside it in `../shared/seeds`, or where the
environment variable STAGELINE_SEEDS says. Where they are absent, a test file that reads one skips.

    TEXT = document("003")                          # at the top of a test file
    BLOCKS = code_blocks(TEXT)
    script = replaced("\n".join(block.code for block in BLOCKS), {"import fairscale": "..."})
    assert missing_lines(BLOCKS, script) == ["import fairscale"]
"""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.people.markdown import Block, blocks

ROOT = Path(__file__).resolve().parent.parent.parent
DIRECTIVE = re.compile(r"^(?P<indent> *)\.\. (?:code-block|code|sourcecode):: *(?P<language>\w*)")
OPTION = re.compile(r"^ +:\w[\w-]*:")


def seeds() -> Path:
    """Return the folder in which the documents lie."""
    return Path(os.environ.get("STAGELINE_SEEDS") or ROOT.parent / "shared" / "seeds")


def document(number: str) -> str:
    """Return the document whose file name begins with a number; skip the test file without it."""
    found = sorted(seeds().glob(f"{number}_*.txt"))
    if not found:
        pytest.skip(f"document {number} is not in {seeds()}", allow_module_level=True)
    return found[0].read_text(encoding="utf-8")


def code_blocks(text: str, *languages: str) -> list[Block]:
    """Return the code blocks of a document in their order: fences and reST directives.

    With languages, only the blocks of these.

    >>> text = "```py\\nx = 1\\n```\\n.. code-block:: python\\n\\n    if x:\\n        y = 2\\nEnd"
    >>> [(block.language, block.first_line, block.code) for block in code_blocks(text)]
    [('py', 2, 'x = 1'), ('python', 6, 'if x:\\n    y = 2')]
    >>> [block.code for block in code_blocks(text, "py")]
    ['x = 1']
    """
    found = sorted([*blocks(text), *_directives(text)], key=lambda block: block.first_line)
    return [block for block in found if not languages or block.language in languages]


def _directives(text: str) -> Iterator[Block]:
    lines = text.splitlines()
    for number, line in enumerate(lines):
        opening = DIRECTIVE.match(line)
        if opening:
            body = list(_indented(lines[number + 1 :], len(opening["indent"])))
            skipped = next((i for i, text in enumerate(body) if _is_code(text)), len(body))
            code = textwrap.dedent("\n".join(body[skipped:])).rstrip()
            yield Block(opening["language"], number + skipped + 2, code, True)


def _indented(lines: Iterable[str], indent: int) -> Iterator[str]:
    """Yield the lines up to the first one that stands no further right than the directive."""
    for line in lines:
        if line.strip() and len(line) - len(line.lstrip()) <= indent:
            return
        yield line


def _is_code(line: str) -> bool:
    return bool(line.strip()) and not OPTION.match(line)


def replaced(code: str, replacements: Mapping[str, str]) -> str:
    """Return the code with some texts replaced; one that does not occur is an error.

    A test lists what it changes in a document: imports, names of devices, sources of data.

    >>> replaced("import torch\\nimport varuna", {"import varuna": "import new"})
    'import torch\\nimport new'
    """
    for old, new in replacements.items():
        assert old in code, f"the document has no {old!r} to replace"
        code = code.replace(old, new)
    return code


def missing_lines(document_blocks: Iterable[Block], script: str) -> list[str]:
    """Return the lines of the document's blocks that the script does not have, without indents.

    Empty lines do not count. A test compares the list with the lines that it replaces, so that what
    runs is the document's own code.

    >>> block = Block("python", 1, "import old\\nx = 1", True)
    >>> missing_lines([block], "import new\\nif True:\\n    x = 1")
    ['import old']
    """
    there = {line.strip() for line in script.splitlines()}
    wanted = (line.strip() for block in document_blocks for line in block.code.splitlines())
    return [line for line in wanted if line and line not in there]
