"""Whose a case is, by its name: a closed form that a job may choose, or a pattern of the hospital's own."""

import re

FORMS = ("name", "before_separator")
SEPARATORS = re.compile(r"[_.-]")
MOST_CHARACTERS = 64  # of a name that a job may ask for
LONGEST_NAME = 255  # characters of a file name on Linux
LONGEST_PATTERN = 200
MOST_CHOICES = 4 * LONGEST_NAME**2  # of a pattern, at each of the places where it may begin: 0.2 s for one name at most

_ESCAPED = re.compile(r"\\.|\(\?#[^)]*\)|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)  # one character, a comment, a set
_VERBOSE = re.compile(r"\(\?[a-zA-Z-]*x")
_REPEAT = re.compile(r"(\)?)([*+?]|\{(\d*)(,?)(\d*)\})[?+]?")


def patient_in(name: str, form: str | int = "name", pattern: str | None = None) -> str:
    """The patient that a case's name tells; the whole name where nothing else is found in it.

    Args:
        name: of the case.
        form: `name`, `before_separator` (up to the first `_`, `.` or `-`) or a number of characters.
        pattern: regular expression that comes before `form`; its first group, or all that it matches, is the patient.
    """
    if pattern is not None:
        found = re.search(pattern, name)
        part = (found.group(1) if found.re.groups else found.group()) if found else None
    else:
        part = name[:form] if isinstance(form, int) else None
        part = SEPARATORS.split(name, maxsplit=1)[0] if form == "before_separator" else part
    return part or name  # an optional group may take no part, a pattern may match nothing


def pattern_problem(pattern: str) -> str:
    """Why a pattern is no regular expression, empty where it is one."""
    if len(pattern) > LONGEST_PATTERN:
        return f"is longer than {LONGEST_PATTERN} characters; shorten it"
    try:
        re.compile(pattern)
    except re.error as error:  # its message may repeat a part of the pattern
        place = "" if error.pos is None else f", see character {error.pos + 1}"
        return f"is no regular expression{place}"
    except (OverflowError, RecursionError):
        return "repeats a part too often or is nested too deeply"
    return ""


def costly_pattern(pattern: str) -> str:
    """Why a pattern could take without end for some name, empty where it cannot.

    The expression engine of Python goes through all ways to match. Where no group is repeated, these are at most the
    product of the choices of the single repeats (255 of `*`, the longest file name), of each `?` and each `|` (2).
    This product is bounded. A pattern that repeats a group may be quick all the same, and is refused: to find a patient
    none has to.
    """
    if _VERBOSE.search(pattern):
        return "is written with (?x); write it without blanks and comments"
    plain = _ESCAPED.sub(lambda found: "" if found[0][:1] == "(" else "x", pattern)
    plain = re.sub(r"\(\?", "(", plain)  # this mark of a group repeats nothing
    choices = 2 ** plain.count("|")  # groups of alternatives in a row multiply
    for closing, sign, least, comma, most in _REPEAT.findall(plain):
        if closing and sign != "?":
            return f"repeats a group, ){sign}, which may take without end; repeat single characters or sets of them"
        choices *= _choices(sign, least, comma, most)
    if choices > MOST_CHOICES:
        return "has too many parts of open length (*, +, ?, {m,n}, |); two of * or + are enough to find a patient"
    return ""


def _choices(sign: str, least: str, comma: str, most: str) -> int:
    if sign == "?":
        return 2
    if sign in ("*", "+") or (comma and not most):
        return LONGEST_NAME
    return min(int(most) - int(least or 0) + 1, LONGEST_NAME) if comma and least + most else 1
