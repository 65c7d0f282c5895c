#!/usr/bin/env python3
"""Forget certificates, so that the next `nvflare provision` issues new ones under the same authority.

    python provisioning/renew_certificates.py workspace/harmofl_prostate HK server
    nvflare provision -p provisioning/project.yml -w workspace -c provisioning/builders --force

Without --force `nvflare provision` leaves kits that are there alone and ends with exit code 4; with it prod_01 comes
beside prod_00, which stays. FLARE keeps what it issued in state/cert.json and hands it out again for ever, expired or
not. Only the kits of the names given get a new certificate and key; the authority stays, so all other kits go on
working.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path


def renew(project: Path, names: Sequence[str]) -> None:
    """Drop the named participants from `project`/state/cert.json.

    Raises:
        ValueError: no state of a provisioning, or an unknown name; then nothing is changed.
    """
    path = project / "state" / "cert.json"
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ValueError(f"{path} cannot be read: give the folder of the project, WORKSPACE/NAME") from None
    issued = sorted(name for name, entry in state.items() if isinstance(entry, dict))
    unknown = [name for name in names if name not in issued]
    if unknown:
        raise ValueError(f"{path} knows no {', '.join(unknown)}; it knows {', '.join(issued)}")
    kept = {name: entry for name, entry in state.items() if name not in names}
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    # it holds every private key, the authority's too
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        json.dump(kept, file)
    temporary.replace(path)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 0, or 2 with one line that says why not."""
    parser = argparse.ArgumentParser(description="Let the next provisioning issue new certificates.")
    parser.add_argument("project", type=Path, metavar="PROJECT", help="folder of the project: WORKSPACE/NAME")
    parser.add_argument("names", nargs="+", metavar="NAME", help="server, site or e-mail address as in project.yml")
    options = parser.parse_args(argv)
    try:
        renew(options.project, options.names)
    except ValueError as error:
        sys.stderr.write(f"renew_certificates: {error}\n")
        return 2
    sys.stdout.write(f"provision again, with --force, for new certificates of {', '.join(options.names)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
