"""The reader of pages: what it takes for code, and what not."""

from __future__ import annotations

from tests.people.markdown import (
    Block,
    as_script,
    blocks,
    commands,
    make_targets,
    running,
    shown_after,
)

PAGE = """\
# A page

```python
x = 1
```

- in a list:

  ```python
  if x:
      y = 2
  ```

<!-- no-run -->

```python
raise SystemExit
```

```console
$ make demo
```

````markdown
```python
this is no code
```
````

Type `make test` and make sure.
"""


def test_blocks_have_language_line_and_code() -> None:
    assert list(blocks(PAGE)) == [
        Block("python", 4, "x = 1", True),
        Block("python", 10, "if x:\n    y = 2", True),
        Block("python", 17, "raise SystemExit", False),
        Block("console", 21, "$ make demo", True),
        Block("markdown", 25, "```python\nthis is no code\n```", True),
    ]


def test_a_line_of_the_script_stands_where_it_stands_in_the_page() -> None:
    script = as_script(PAGE).split("\n")
    assert script[3] == "x = 1"
    assert script[9:11] == ["if x:", "    y = 2"]
    assert "".join(script[11:]) == ""


def test_commands_are_those_of_blocks_and_inline_code() -> None:
    assert {"make demo", "make test"} <= set(commands(PAGE))
    assert make_targets(PAGE) == {"demo", "test"}


SHOWN = """\
```python
print("a")
print(" b")
```

    a
     b

    after an empty line

Text, and

    what belongs to it

```python
print(1)
```
Text.

    2
"""


def test_what_is_shown_after_a_block_ends_with_the_next_text() -> None:
    first, second = running(SHOWN)
    assert shown_after(SHOWN, first) == "a\n b\n\nafter an empty line"
    assert shown_after(SHOWN, second) == ""


def test_a_mark_is_printed_in_place_of_each_fence() -> None:
    script = as_script(SHOWN, mark="next").split("\n")
    assert [number for number, line in enumerate(script) if line == "print('next')"] == [0, 14]
    assert script[1] == 'print("a")'
