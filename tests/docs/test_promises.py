"""What no page promises, because FLARE 2.9 does not have it. A21."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [path for path in ROOT.rglob("*.md") if not {".venv", "venv", "tests"} & set(path.relative_to(ROOT).parts)]
SAID = "There is no stand-by server."
STANDBY = re.compile(r"overseer|high.availability|\bHA\b|stand-?by server|second server|fail-?over", re.IGNORECASE)


def test_a21_no_page_counts_on_a_second_server() -> None:
    settings = [*ROOT.glob("provisioning/**/*.yml"), *ROOT.glob("provisioning/**/*.json")]
    assert len(PAGES) > 5 and settings
    texts = {path: path.read_text(encoding="utf-8").replace(SAID, "") for path in (*PAGES, *settings)}
    assert not [path.name for path, text in texts.items() if STANDBY.search(text)]
    assert all(STANDBY.search(text) for text in ("an overseer", "High Availability", "HA mode", "a standby server"))
    page = (ROOT / "provisioning" / "README.md").read_text()
    assert SAID in page and "harmofl resume" in page, "what there is instead"
