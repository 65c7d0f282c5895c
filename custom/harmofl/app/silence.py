"""FLARE without its lines on the console: a command says in its own words what went wrong."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO


@contextmanager
def flare_unlogged() -> Iterator[None]:
    """Keep what FLARE logs, in any thread, from the console; other loggers are left alone."""
    logger, nothing = logging.getLogger("nvflare"), logging.NullHandler()
    held = logger.propagate
    logger.propagate = False
    logger.addHandler(nothing)  # without a handler Python prints warnings itself
    try:
        yield
    finally:
        logger.removeHandler(nothing)
        logger.propagate = held


@contextmanager
def flare_silent() -> Iterator[None]:
    """Keep what a call of FLARE logs and prints from the console; nothing of ours may be printed inside."""
    with flare_unlogged(), redirect_stdout(StringIO()):
        yield
