from harmofl.data.findings import CaseError, Finding


def test_a_finding_is_one_line_with_file_problem_and_fix() -> None:
    finding = Finding("error", "damaged_file", "Case00.nii.gz", "cut\nshort", "copy it\n again")
    assert str(finding) == "error: Case00.nii.gz: cut short; copy it again"
    assert str(CaseError(finding)) == str(finding)


def test_no_fix_no_semicolon() -> None:
    assert str(Finding("notice", "thin_volume", "Case00.nii.gz", "1 slice")) == "notice: Case00.nii.gz: 1 slice"
