"""One logger, the rank in front, the level by the environment."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from stageline import log


@pytest.fixture(autouse=True)
def logger() -> Iterator[logging.Logger]:
    """The library's logger without handlers and level; put back as it was afterwards."""
    found = logging.getLogger("stageline")
    before = found.level, found.propagate, list(found.handlers)
    found.setLevel(logging.NOTSET)
    found.handlers.clear()
    yield found
    found.setLevel(before[0])
    found.propagate = before[1]
    found.handlers[:] = before[2]


@pytest.mark.parametrize("level", log.LEVELS)
def test_the_environment_sets_the_level(
    level: str, logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAGELINE_LOG", level.capitalize())
    log.configure()
    assert logger.level == getattr(logging, level.upper())


def test_configuring_twice_prints_every_line_once(
    logger: logging.Logger, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STAGELINE_LOG", "debug")
    log.configure()
    log.configure()
    assert len(logger.handlers) == 1
    log.debug(3, "sent 0->1 F0")
    assert capsys.readouterr().err == "stageline DEBUG: rank 3: sent 0->1 F0\n"


def test_without_the_variable_the_users_logging_is_left_alone(
    logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STAGELINE_LOG", raising=False)
    log.configure()
    assert logger.handlers == []
    assert logger.level == logging.NOTSET


def test_a_wrong_level_is_reported_and_not_raised(
    logger: logging.Logger, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("STAGELINE_LOG", "loud")
    log.configure()
    assert caplog.messages == [
        "STAGELINE_LOG=loud is no level: use one of debug, info, warning, error"
    ]
    assert logger.handlers == []


def test_the_rank_stands_in_front(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="stageline"):
        log.debug(2, "begins")
        log.warning(0, "the observer raised")
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("DEBUG", "rank 2: begins"),
        ("WARNING", "rank 0: the observer raised"),
    ]


def test_a_level_hides_what_lies_below_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STAGELINE_LOG", "warning")
    log.configure()
    log.debug(0, "hidden")
    log.warning(0, "seen")
    assert capsys.readouterr().err == "stageline WARNING: rank 0: seen\n"


def test_a_user_with_a_handler_of_their_own_sees_every_line_once(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """``logging.basicConfig()`` and STAGELINE_LOG together: two handlers, but one line."""
    monkeypatch.setenv("STAGELINE_LOG", "debug")
    log.configure()
    log.debug(0, "once")
    assert capsys.readouterr().err.count("once") + caplog.messages.count("rank 0: once") == 1
