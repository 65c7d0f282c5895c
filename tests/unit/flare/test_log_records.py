"""Records of the log files: what others sent cannot pass for a record of its own."""

import io
import logging

import pytest

from harmofl.flare.log_records import CONTINUED, GuardRecords, guard_log_records

FORGED = "2026-11-30 12:00:00,000 - INFO - round 9: 3 of 3 sites accepted"


@pytest.fixture
def log():
    """A logger with two handlers that stand for a console and a file, and what each wrote."""
    logger = logging.Logger("flare")
    streams = [io.StringIO(), io.StringIO()]
    for stream in streams:
        handler = logging.StreamHandler(stream)
        handler.setFormatter(logging.Formatter("%(levelname)s - %(message)s"))
        handler.addFilter(GuardRecords())
        logger.addHandler(handler)
    return logger, streams


def test_a_forged_record_is_a_marked_line(log):
    logger, streams = log
    logger.error("Type '%s' is not allowed", f"x\n{FORGED}\x1b[2J\r{FORGED}\u2028\u202ey")
    told = [stream.getvalue() for stream in streams]
    assert told[0] == told[1] == f"ERROR - Type 'x\n{CONTINUED}{FORGED}?[2J {FORGED} ?y' is not allowed\n"


def test_an_exception_with_such_a_text_too(log):
    logger, streams = log
    try:
        raise ValueError(f"x\n{FORGED}\x07")
    except ValueError:
        logger.exception("decoding failed")
    lines = streams[0].getvalue().splitlines()
    assert lines[0] == "ERROR - decoding failed" and lines[-1] == f"{CONTINUED}{FORGED}?"
    assert all(line.startswith(CONTINUED) for line in lines[1:])


def test_each_handler_is_guarded_once(monkeypatch):
    handler = logging.NullHandler()
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    guard_log_records()
    guard_log_records()
    assert [type(held) for held in handler.filters] == [GuardRecords]
