"""The index of Camelyon17-WILDS: read by column names, wrong rows named with their line."""

from pathlib import Path

import pytest

from harmofl.data.findings import DataRootError
from harmofl.data.patch_index import read_index
from tests.wilds import row, write_index


def message_of(folder: Path, *centers: int) -> str:
    with pytest.raises(DataRootError) as caught:
        read_index(folder, centers or [0])
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_only_rows_of_the_wanted_centers(tmp_path):
    lines = [
        row(0, "004", 1),
        row(1, "025", 0, "11", center=1, split=1),
        row(2, "044", 1, "20", center=2),
        row(3),
    ]
    index = read_index(write_index(tmp_path, *lines), [0, 2])
    assert len(index) == 3
    assert [index.patients[code] for code in index.patient] == ["004", "044", "004"]
    assert [index.slides[code] for code in index.slide] == [("004", "0"), ("044", "20"), ("004", "0")]
    assert index.tumor.tolist() == [1, 1, 0]
    assert index.name(1) == "patches/patient_044_node_1/patch_patient_044_node_1_x_2_y_4.png"
    assert index.counts() == {(0, 0, 0): 1, (0, 1, 0): 1, (2, 1, 0): 1}
    assert index.findings == ()


def test_columns_are_found_by_name(tmp_path):
    header = "split,center,slide,tumor,y_coord,x_coord,node,patient,extra"
    content = f'\ufeff{header}\r\n1,3,s7,1,20,10,2,"061",x\r\n\r\n'
    (tmp_path / "metadata.csv").write_bytes(content.encode())
    index = read_index(tmp_path, [3])
    assert index.name(0) == "patches/patient_061_node_2/patch_patient_061_node_2_x_10_y_20.png"
    assert index.counts() == {(3, 1, 1): 1}


def test_zeros_that_a_spreadsheet_took_from_a_patient_come_back(tmp_path):
    index = read_index(write_index(tmp_path, row(0, "4"), row(1, "004"), row(2, "A4")), [0])
    assert index.patients == ("004", "A4")


def test_rows_of_many_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr("harmofl.data.patch_index.BLOCK", 3)
    lines = [row(number, center=number % 2) for number in range(11)]
    index = read_index(write_index(tmp_path, *lines), [1])
    assert index.x.tolist() == [1, 3, 5, 7, 9]
    lines[7] = row(7, tumor=5)
    assert "line 9: tumor is '5'" in message_of(write_index(tmp_path, *lines))


def test_a_missing_file_or_column_is_named(tmp_path):
    assert "metadata.csv cannot be read" in message_of(tmp_path)
    folder = write_index(tmp_path, "004,1,2,3,0", header="patient,node,x_coord,y_coord,tumor")
    assert "line 1: no column slide, center, split" in message_of(folder)
    (tmp_path / "metadata.csv").write_bytes(b"")
    assert message_of(folder) == "metadata.csv is empty; copy it again from its source"
    write_index(tmp_path)
    assert message_of(folder) == "metadata.csv has no row behind its first line; copy it again from its source"
    (tmp_path / "metadata.csv").write_text("sep=,\n")
    assert "line 1: is 'sep=', a note to spreadsheets; delete this line" in message_of(folder)
    (tmp_path / "metadata.csv").write_bytes(b"PK\x03\x04" + bytes(60))  # a workbook of Excel
    assert "is a zip archive, no text; export the table as CSV" in message_of(folder)
    (tmp_path / "metadata.csv").write_bytes(b"\xff\xff\x00\x00")
    assert "no UTF-8 text" in message_of(folder)


@pytest.mark.parametrize(("mark", "name"), [(";", "semicolons"), ("\t", "tabs"), ("|", "bars")])
def test_another_separator_is_said_to_be_that(tmp_path, mark, name):
    path = write_index(tmp_path, row(0), row(1)) / "metadata.csv"
    path.write_text(path.read_text().replace(",", mark))
    told = f"metadata.csv, line 1: columns are separated by {name}; export it with commas"
    assert message_of(tmp_path) == told
    # as a spreadsheet writes it, with quotes and a byte order mark
    path.write_text("\ufeff" + path.read_text().replace(mark, f'"{mark}"'), encoding="utf-8")
    assert message_of(tmp_path) == told


def test_a_byte_order_mark_is_no_mistake(tmp_path):
    path = write_index(tmp_path, row(0)) / "metadata.csv"
    path.write_text(path.read_text(), encoding="utf-8-sig")
    assert len(read_index(tmp_path, [0])) == 1


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_utf_16_is_said_to_be_that(tmp_path, encoding):
    path = write_index(tmp_path, row(0)) / "metadata.csv"
    path.write_text(path.read_text(), encoding=encoding)
    assert message_of(tmp_path).endswith("metadata.csv: the text is UTF-16; save it as UTF-8")


def test_a_comma_inside_a_number_is_pointed_at(tmp_path):
    folder = write_index(tmp_path, row(0).replace(",0,", ",0,0,", 1))
    assert "10 columns instead of 9 (a comma inside a number counts as one more)" in message_of(folder)


@pytest.mark.parametrize(
    ("broken", "problem"),
    [
        ("1,004,1,2", "4 columns instead of 9"),
        ("1,004,1,2,4,0,0,0,0,0", "10 columns instead of 9"),
        ("1,004,one,2,4,0,0,0,0", "node is 'one', not an integer"),
        ("1,004,1,2.5,4,0,0,0,0", "x_coord is '2.5', not an integer"),
        ("1,004,1,2,99999999999,0,0,0,0", "y_coord is '99999999999'"),
        ("1,004,1,2,-9223372036854775808,0,0,0,0", "y_coord is '-9223372036854775808'"),
        ("1,004,1,2,4,2,0,0,0", "tumor is '2', not 0 or 1"),
        ("1,004,1,2,4,,0,0,0", "tumor is '', not 0 or 1"),
        ("1,../..,1,2,4,0,0,0,0", "patient is '../..'"),
    ],
)
def test_a_row_that_cannot_be_parsed_is_named_with_its_line(tmp_path, broken, problem):
    message = message_of(write_index(tmp_path, row(0), "", broken, row(2)))
    assert f"metadata.csv, line 4: {problem}" in message
    assert "correct the line" in message


def test_an_unknown_center_is_named_with_those_that_exist(tmp_path):
    folder = write_index(tmp_path, row(0, center=1), row(1, center=3))
    assert "no row of center 5 (it has 1, 3, counted from 0)" in message_of(folder, 1, 5)


def test_a_patch_listed_twice_counts_once(tmp_path):
    index = read_index(write_index(tmp_path, row(0), row(7, tumor=1), row(0), row(7, tumor=1), row(7, tumor=1)), [0])
    assert index.x.tolist() == [0, 7]
    assert [(finding.severity, finding.code) for finding in index.findings] == [("warning", "duplicate_patch")]
    assert "3 rows" in index.findings[0].message


def test_a_patch_with_both_labels_is_refused(tmp_path):
    message = message_of(write_index(tmp_path, row(0), row(7, tumor=1), row(7, tumor=0)))
    assert "x 7, y 14" in message


def test_without_a_center_the_file_must_hold_one_only(tmp_path):
    index = read_index(write_index(tmp_path, row(0, center=3), row(1, center=3)), [])
    assert len(index) == 2
    with pytest.raises(
        DataRootError, match="has rows of the centers 2, 3; say which are this site's: centers in local"
    ):
        read_index(write_index(tmp_path, row(0, center=3), row(1, center=2)), [])
