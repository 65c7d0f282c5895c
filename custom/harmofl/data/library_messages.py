"""What libraries print while they read one file: collected, so that it is told with the name of that file."""

import logging
import os
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

MOST_LETTERS = 300  # of all messages about one file
# About the code of a library, not about a file.
ABOUT_CODE = (DeprecationWarning, PendingDeprecationWarning, FutureWarning)

_collecting = threading.local()
_one_at_a_time = threading.RLock()


class _Collector(logging.Filter):
    """Takes warnings and errors out of a logger while a thread collects them."""

    def filter(self, record: logging.LogRecord) -> bool:
        messages: list[str] | None = getattr(_collecting, "messages", None)
        if messages is None or record.levelno < logging.WARNING:
            return True
        messages.append(record.getMessage())
        return False


_COLLECTOR = _Collector()


@contextmanager
def collect_messages(*loggers: str, stderr: bool = False) -> Iterator[list[str]]:
    """Collect what libraries say inside the `with` instead of printing it.

    One thread at a time collects: Python's warnings and the descriptor of standard error belong to the process.

    Args:
        loggers: names of the loggers whose warnings and errors are collected, of this thread alone. Python's warnings
            are always collected.
        stderr: collect also what C code writes to the file descriptor of standard error, as libtiff does.

    Yields:
        the messages, complete after the `with`, in the order of the three ways.
    """
    for name in loggers:
        logging.getLogger(name).addFilter(_COLLECTOR)
    messages: list[str] = []
    outer, _collecting.messages = getattr(_collecting, "messages", None), messages
    try:
        with _one_at_a_time, warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            if stderr:
                with _standard_error(messages):
                    yield messages
            else:
                yield messages
    finally:
        _collecting.messages = outer
        messages += [str(one.message) for one in warned if not issubclass(one.category, ABOUT_CODE)]


def in_one_line(messages: Sequence[str], path: Path, subject: str) -> str:
    """Messages in one line of bounded length, each once, without characters that a terminal acts upon.

    Args:
        messages: of libraries about a file.
        path: of the file; a part of it that is left when a line is cut would not be recognized any more.
        subject: stands wherever the path stood.
    """
    single = [" ".join(message.replace(str(path), subject).split()) for message in messages]
    line = "; ".join(dict.fromkeys(message for message in single if message))
    printable = "".join(letter if letter.isprintable() else "?" for letter in line)
    return printable if len(printable) <= MOST_LETTERS else f"{printable[:MOST_LETTERS]} ..."


@contextmanager
def _standard_error(messages: list[str]) -> Iterator[None]:
    """Lead file descriptor 2 into a file and read the lines back from it."""
    with tempfile.TemporaryFile() as written:
        try:
            sys.stderr.flush()
            kept = os.dup(2)
        except (OSError, ValueError, AttributeError):  # a process without standard error
            yield
            return
        os.dup2(written.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            written.seek(0)
            messages += written.read().decode(errors="replace").splitlines()
