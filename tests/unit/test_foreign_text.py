"""JSON and names that somebody else wrote: refused in one printable line. Found by tests.benchmarks.fuzz."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from harmofl.data.findings import DataRootError, Finding
from harmofl.data.sitemap import read_site_map
from harmofl.experiment import ExperimentError, parse_assignment, read_settings, resolve
from harmofl.job_folder import read_json
from harmofl.sections import DEEPEST, MOST_LETTERS, one_line, outside_text, parse_json

DEEP = {
    "deeper than the parser goes": "[" * 100_000,
    "deep and closed": "[" * 3000 + "]" * 3000,
    "deeper than any file": '{"a":' * (DEEPEST + 1) + "{}" + "}" * (DEEPEST + 1),
}
LONG = '{"seed": ' + "9" * 5000 + "}"
READERS: dict[str, tuple[Callable[[Path], object], type[Exception]]] = {
    "experiment.json": (read_settings, ExperimentError),
    "sites.json": (read_site_map, DataRootError),
    "meta.json": (lambda path: read_json(path, "name a job folder"), ExperimentError),
}


@pytest.mark.parametrize("text", [*DEEP.values(), LONG], ids=[*DEEP, "a number of 5000 digits"])
@pytest.mark.parametrize("name", READERS)
def test_json_that_the_parser_itself_gives_up_on_is_refused(tmp_path: Path, name: str, text: str) -> None:
    read, kind = READERS[name]
    (tmp_path / name).write_text(text)
    with pytest.raises(kind, match="too deeply|too many digits") as caught:
        read(tmp_path / name)
    assert "\n" not in str(caught.value) and name in str(caught.value)


def test_as_deep_as_any_file_is_read() -> None:
    # a list of a list ... of 100 lists is 100 levels deep
    text = "[" * DEEPEST + "]" * DEEPEST
    assert json.dumps(parse_json(text)) == text
    with pytest.raises(json.JSONDecodeError):
        parse_json(f"[{text}]")


def test_a_value_of_the_command_line_too_deep_for_json_is_text() -> None:
    assert parse_assignment("data.aliases=" + DEEP["deep and closed"]) == ("data.aliases", DEEP["deep and closed"])


def test_what_cannot_be_printed_is_replaced() -> None:
    # a bell, an escape that would color a terminal, a lone surrogate as of a file name that is no UTF-8
    assert one_line("a\n\tb\x07\x1b[31m\udcff ä") == "a  b??[31m? ä"
    assert str(Finding("error", "code", "Case\n00\x1b", "is\r\nodd", "fix  it")) == "error: Case 00?: is odd; fix it"


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        # ESC, the eight-bit CSI, a bell, what turns the direction of writing, a zero-width space, a private letter
        ("\x1b[2J\x9b1m\x07\u202ea\u2066b\u200bc\ue000", "?[2J?1m??a?b?c?"),
        ("a\r\nb\u2028c\u2029d\x85e\tf", "a  b c d e f"),
        ("\ud800 ü 漢字", "? ü 漢字"),
        *[(value, str(value)) for value in (None, True, 3, -1, 0.5)],
        *[([1], "a list"), ({"a": 1}, "a dict"), (b"\x1b", "a bytes"), (10**400, "a int")],
        pytest.param(object(), "a object", id="object"),
    ],
    ids=repr,
)
def test_text_from_outside_is_one_printable_line(sent: object, shown: str) -> None:
    assert outside_text(sent) == shown and outside_text(sent).isprintable()


def test_text_from_outside_has_at_most_200_letters() -> None:
    assert outside_text("x" * 200) == "x" * 200
    assert outside_text("x" * 10**7) == "x" * 196 + " ..." and MOST_LETTERS == 200
    assert one_line("x" * 1000) == "x" * 1000, "lines of our own are not cut"


def test_a_key_of_several_lines_is_refused_in_one(tmp_path: Path, written: dict) -> None:
    with pytest.raises(ExperimentError) as caught:
        resolve(written | {"train\ning\x1b[2J": 1})
    assert str(caught.value).startswith("experiment.json: train ing?[2J: unknown setting")
    (tmp_path / "sites.json").write_text(json.dumps({"sites": {"lu\nng": {"organ": 3}}}))
    with pytest.raises(DataRootError, match="sites.lu ng.organ"):
        read_site_map(tmp_path / "sites.json")
