"""Findings: what is wrong with a site's data, said once, in one line, with the fix."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One observation about a site's data.

    An ``error`` means that something in the folder is not used, a ``warning`` that it is used and a person should
    look, a ``notice`` that a rule was applied. ``severity`` and ``code`` may leave the site; ``subject``, ``message``
    and ``fix`` hold file names and stay in local logs.

    Attributes:
        severity: how much it matters.
        code: stable short name, such as ``geometry_mismatch``.
        subject: file names relative to the site's folder.
        message: what is wrong.
        fix: what to do about it; empty where nothing has to be done.
    """

    severity: Literal["error", "warning", "notice"]
    code: str
    subject: str
    message: str
    fix: str = ""

    def __str__(self) -> str:
        """Return the finding as one line for a local log."""
        line = f"{self.severity}: {self.subject}: {self.message}"
        line = f"{line}; {self.fix}" if self.fix else line
        return _one_line(" ".join(line.split()))


class CaseError(ValueError):
    """A case cannot be used; ``finding`` says why."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding


class DataRootError(ValueError):
    """The data folder of a site is missing or holds nothing that can be used; the message is one line."""

    def __init__(self, message: str) -> None:
        super().__init__(_one_line(message))


class SharedFolderError(DataRootError):
    """Two sites would train on the same data."""


def count_text(number: int, noun: str, plural: str = "") -> str:
    """A number of things for a person: `1 hole`, `2 holes`, `1 box`, `2 boxes`."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def refusal(code: str, subject: str, message: str, fix: str) -> CaseError:
    """Return the error that takes one case out of use."""
    return CaseError(Finding("error", code, subject, message, fix))


def _one_line(text: str) -> str:
    # as harmofl.sections has it: an export brings this file without the rest of the package
    return "".join(letter if letter.isprintable() else " " if letter.isspace() else "?" for letter in text.rstrip("\n"))
