"""No garbage collection while stageline is imported.

Importing makes thousands of objects that stay, so Python looks for garbage in all objects there
are, torch's included: 60 ms, a third of the import, and nothing is found. ``stageline/__init__.py``
imports this first and calls ``resume`` last.
"""

import gc

_was_enabled = gc.isenabled()
gc.disable()


def resume() -> None:
    """Collect again, if it was so before."""
    if _was_enabled:
        gc.enable()
