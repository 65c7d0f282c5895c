"""Sections of settings: strict, frozen, and with errors in one line that a person can act on."""

import json
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from itertools import islice
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

DEEPEST = 100  # levels of a JSON file; those of the project have five
MOST_LETTERS = 200  # of one text that somebody else wrote
MOST_NAMES = 20  # in one line about many sites
_CUT = " ..."


class ExperimentError(ValueError):
    """An experiment that cannot be used; the message is one line a person can act on."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


def one_line(text: str, most: int | None = None) -> str:
    """Text that may hold what somebody else wrote as one printable line: keys and values are not always ours.

    Control characters, line breaks, what changes the direction of writing or shows nothing, and lone surrogates are
    replaced. `most` bounds the number of letters.
    """
    if most is not None and len(text) > most:
        text = text[: most - len(_CUT)] + _CUT
    return "".join(letter if letter.isprintable() else " " if letter.isspace() else "?" for letter in text.rstrip("\n"))


def outside_text(value: Any) -> str:
    """What somebody else sent as one printable line of at most 200 letters; a value that is no text by its type.

    For every text that comes from another participant, before it is logged, kept or shown.
    """
    if isinstance(value, str):
        return one_line(value, MOST_LETTERS)
    if value is None or isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 2**64):
        return str(value)
    return f"a {type(value).__name__}"


def names_text(names: Collection[str], separator: str = ", ") -> str:
    """Names in one line, of many only the first 20: `A, B and 980 more`."""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return separator.join(islice(names, MOST_NAMES)) + more


def parse_json(text: str) -> Any:
    """Parse JSON of unknown origin.

    Raises:
        json.JSONDecodeError: also where it is nested too deeply or holds a number of thousands of digits, for which
            the parser has other exceptions.
    """
    try:
        content = json.loads(text)
    except json.JSONDecodeError:
        raise
    except (RecursionError, ValueError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else "a number with too many digits"
        raise json.JSONDecodeError(reason, text, 0) from None
    level = [content] if isinstance(content, dict | list) else []
    for _ in range(DEEPEST):
        inner = [value.values() if isinstance(value, dict) else value for value in level]
        level = [part for values in inner for part in values if isinstance(part, dict | list)]
        if not level:
            return content
    raise json.JSONDecodeError("nested too deeply", text, 0)


class Section(BaseModel):
    """A group of settings: frozen, unknown keys refused, no silent conversion of types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def first_problem(error: ValidationError, section: type[BaseModel], prefix: str = "") -> str:
    """One line for the first problem: key (below `prefix`), value, what is allowed."""
    problem = error.errors()[0]
    key = prefix + ".".join(str(part) for part in problem["loc"]) or "experiment"
    if problem["type"] == "extra_forbidden":
        return f"{key}: unknown setting (value {_short(problem['input'])}){nearest(key, known_keys(section, prefix))}"
    if problem["type"] == "missing":
        return f"{key}: is missing"
    value = "" if isinstance(problem["input"], dict) else f", not {_short(problem['input'])}"
    return f"{key}: {problem['msg'].removeprefix('Value error, ')}{value}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def known_keys(section: type[BaseModel], prefix: str = "") -> list[str]:
    """The names of all settings of a section and the sections in it."""
    keys = []
    for name, field in section.model_fields.items():
        keys.append(prefix + name)
        for inner in (field.annotation, *get_args(field.annotation)):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                keys += known_keys(inner, f"{prefix}{name}.")
    return keys


def nearest(name: str, known: Iterable[str]) -> str:
    """A question with the known name that is nearest, empty where none is near."""
    matches = get_close_matches(str(name), list(known), n=1, cutoff=0.5)
    return f"; did you mean '{matches[0]}'?" if matches else ""


def set_key(settings: dict[str, Any], dotted: str, value: Any) -> None:
    """Set `section.key` in place. Unknown names are refused later, by validation, with the nearest known one.

    Raises:
        ExperimentError: the path runs through something that is not a section.
    """
    *sections, last = dotted.split(".")
    place = settings
    for section in sections:
        place = place.setdefault(section, {})
        if not isinstance(place, dict):
            raise ExperimentError(f"{dotted}: '{section}' is not a section")
    place[last] = value


def fill(settings: dict[str, Any], values: dict[str, Any]) -> None:
    """Set each `section.key` that is not set."""
    for key, value in values.items():
        section, _, last = key.partition(".")
        if isinstance(settings.get(section, {}), dict):
            settings.setdefault(section, {}).setdefault(last, value)
