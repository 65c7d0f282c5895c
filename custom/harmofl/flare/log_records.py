"""Records of the log files: no text in one can pass for another record, or command the terminal that shows it."""

import logging

from harmofl.sections import one_line

_MARK = "harmofl_guarded"
CONTINUED = "    | "


class GuardRecords(logging.Filter):
    """Makes the lines of a record printable and marks all but the first, so that none begins as a record does.

    FLARE logs what other participants sent, names of types and texts of errors among it, as it came.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Change one record in place, for all handlers; it always passes."""
        if not hasattr(record, _MARK):
            setattr(record, _MARK, True)
            record.msg, record.args = printable_record(record.getMessage()), None
            if record.exc_info and not record.exc_text:
                text = logging.Formatter().formatException(record.exc_info)
                record.exc_text = CONTINUED + printable_record(text)
        return True


def printable_record(text: str) -> str:
    """The text with every line printable, and every further line marked as part of the record."""
    return f"\n{CONTINUED}".join(one_line(line) for line in text.rstrip("\n").split("\n"))


def guard_log_records() -> None:
    """Guard every handler of this process's root logger, which FLARE's configuration gives it, once."""
    for handler in logging.getLogger().handlers:
        if not any(isinstance(held, GuardRecords) for held in handler.filters):
            handler.addFilter(GuardRecords())
