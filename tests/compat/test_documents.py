"""The reader of the older systems' documents: what it takes for code, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compat.documents import code_blocks, document, missing_lines, replaced, seeds

REST = """\
Title
=====

.. code-block:: default


    import torch

    class Model:
        x = 1

Text that ends it.

.. code-block:: python
    :linenos:

    y = 2
.. note::

    This is no code.
"""

MARKDOWN = """\
# Title

```python
x = 1
```

```
$ a command
```
"""


def test_directives_of_rest_are_blocks() -> None:
    first, second = code_blocks(REST)
    assert first == ("default", 7, "import torch\n\nclass Model:\n    x = 1", True)
    assert second == ("python", 17, "y = 2", True)
    assert REST.splitlines()[second.first_line - 1].strip() == "y = 2"


def test_fences_of_markdown_are_blocks() -> None:
    assert [(block.language, block.code) for block in code_blocks(MARKDOWN)] == [
        ("python", "x = 1"),
        ("", "$ a command"),
    ]
    assert [block.code for block in code_blocks(MARKDOWN, "python")] == ["x = 1"]


def test_a_replacement_that_finds_nothing_is_an_error() -> None:
    with pytest.raises(AssertionError, match="has no 'import b' to replace"):
        replaced("import a", {"import b": "import c"})


def test_lines_that_the_script_lacks_are_listed() -> None:
    assert missing_lines(code_blocks(MARKDOWN), "if True:\n    x = 1") == ["$ a command"]


def test_a_document_that_is_absent_skips(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STAGELINE_SEEDS", str(tmp_path))
    with pytest.raises(pytest.skip.Exception, match="document 003 is not in"):
        document("003")
    (tmp_path / "003_abc.txt").write_text("text")
    assert document("003") == "text"
    assert seeds() == tmp_path
