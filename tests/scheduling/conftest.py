"""Settings of the property tests."""

from __future__ import annotations

from hypothesis import settings

# A deadline in seconds fails on a busy machine and says nothing about the code.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
