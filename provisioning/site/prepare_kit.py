#!/usr/bin/env python3
"""Set up a startup kit for HarmoFL: write local/*.json from the templates beside this file.

    python provisioning/site/prepare_kit.py KIT --data-root DIR                a hospital
    python provisioning/site/prepare_kit.py KIT --data-root DIR --preinstalled one that runs no code of a job
    python provisioning/site/prepare_kit.py KIT --relay                        a site that sums what others answer
    python provisioning/site/prepare_kit.py KIT                                the server

Needs Python 3.10 or later and nothing else. Touches nothing in startup/, which is signed, and replaces no file that
says something else unless told to. Run it where the kit will stay: it writes absolute paths.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

TEMPLATES = Path(__file__).resolve().parent
# where FLARE's server keeps jobs and snapshots by default: shared by all servers of a machine, lost at reboot
TEMPORARY_STORAGE = Path("/tmp/nvflare")
JOB_STORAGE = "jobs-storage"
MOST_CLIP = 2.0  # as harmofl.flare.site_settings has it
SNAPSHOT_STORAGE = "snapshot-storage"

Settings = dict[str, Any]


class KitError(Exception):
    """A kit cannot be set up as asked; the message says what is wrong and what to do."""


class Noise(NamedTuple):
    """Noise on the amplitude that leaves a site: patients are clipped, the sum is (epsilon, delta)."""

    relative_clip: float
    epsilon: float
    delta: float


class Names(NamedTuple):
    """How this hospital names its data: what a job cannot say.

    `patient_pattern` is a regular expression that finds the patient in a case's name, `folder` the one in the data root
    that is this site's, `centers` the values of the column `center` of metadata.csv whose rows are this site's.
    """

    patient_pattern: str | None = None
    folder: str | None = None
    centers: tuple[int, ...] | None = None


def prepare_kit(
    kit: Path,
    *,
    data_root: Path | None = None,
    preinstalled: bool = False,
    noise: Noise | None = None,
    limits: Sequence[str] = (),
    names: Names | None = None,
    storage: Path | None = None,
    in_container: bool = False,
    relay: bool = False,
    force: bool = False,
) -> list[Path]:
    """Write local/{privacy,authorization,resources,log_config}.json of a site's kit; the server's has no privacy.json.

    Doing it again with the same arguments changes nothing.

    Args:
        kit: folder with startup/ and local/.
        data_root: absolute folder of this site's images; for a site only.
        preinstalled: refuse jobs that bring code; the package has to be installed here.
        noise: put noise on the amplitude that leaves this site.
        limits: what this site allows other than privacy.json has it, each as NAME=VALUE.
        names: how this site names its data, where a job's rules do not fit.
        storage: absolute folder for the server's jobs and snapshots (default: the kit).
        in_container: data_root is a path inside the job's container, not of this machine.
        relay: this site stands above others, whose answers it sums; it has no images, and so no privacy.json.
        force: replace files that say something else.

    Returns:
        The files that were written, without those that were right already.

    Raises:
        KitError: no kit of a site or server, an unusable folder, or a file that was edited; then nothing is written.
    """
    kit = kit.resolve()
    of_images = data_root is not None or noise is not None or bool(limits) or names is not None or in_container
    if _is_server(kit):
        if of_images or relay:
            raise KitError(
                f"{kit.name} is the server's kit: it has no images, so no data root, noise, limits or names of data, "
                "and it is no relay"
            )
        files = _server_files(kit, preinstalled, storage)
    elif storage is not None:
        raise KitError(f"{kit.name} is a site's kit: job storage belongs to the server")
    elif relay:
        if of_images:
            raise KitError(f"{kit.name}: a relay has no images, so no data root, noise, limits or names of data")
        if (kit / "local" / "privacy.json").exists():
            raise KitError(f"{kit.name}: local/privacy.json lets no sum of others out; remove it from a relay's kit")
        files = _relay_files(kit, preinstalled)
    else:
        files = _site_files(kit, _checked_root(kit.name, data_root, in_container), preinstalled, noise)
        files["privacy.json"]["scopes"][0]["properties"]["limits"] |= read_limits(limits)
        if names is not None:
            files["privacy.json"]["scopes"][0]["properties"] |= _checked_names(kit.name, names)
    texts = {kit / "local" / name: json.dumps(settings, indent=2) + "\n" for name, settings in files.items()}
    changed = {path: text for path, text in texts.items() if not _says(path, text)}
    edited = [f"local/{path.name}" for path in changed if path.exists()]
    if edited and not force:
        raise KitError(
            f"{kit.name}: {', '.join(edited)} would change; compare, keep what is yours, then say --force to replace"
        )
    for path, text in changed.items():
        _write(path, text)
    return list(changed)


def read_limits(given: Sequence[str]) -> Settings:
    """Limits as NAME=VALUE, each as a value of the kind that it has in privacy.json.

    Raises:
        KitError: another form, an unknown name, or a value of another kind.
    """
    held, limits = _template("privacy.json")["scopes"][0]["properties"]["limits"], {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise KitError(f"--limit {text}: write it as NAME=VALUE, for example minimum_sites=2")
        if name not in held:
            near = get_close_matches(name, held, n=1, cutoff=0.5)
            question = f"did you mean {near[0]}?" if near else f"there are {', '.join(held)}"
            raise KitError(f"--limit {name}: no such limit; {question}")
        limits[name] = _limit(text, value, held[name])
    return limits


def _limit(text: str, value: str, held: Any) -> Any:
    if isinstance(held, list):
        return [part for part in value.split(",") if part]
    if isinstance(held, bool):
        if value not in ("true", "false"):
            raise KitError(f"--limit {text}: give true or false")
        return value == "true"
    if not (value.isascii() and value.isdecimal() and int(value[:18]) > 0 and len(value) <= 18):
        raise KitError(f"--limit {text}: give a whole number above 0")
    return int(value)


def _is_server(kit: Path) -> bool:
    if not (kit / "startup").is_dir() or not (kit / "local").is_dir():
        raise KitError(f"{kit} is not a startup kit: it needs the folders startup and local")
    if (kit / "startup" / "fed_admin.json").exists():
        raise KitError(f"{kit.name} is the kit of a person: nothing to set up, use it as it is")
    server = (kit / "startup" / "fed_server.json").exists()
    if not server and not (kit / "startup" / "fed_client.json").exists():
        raise KitError(f"{kit} is not a startup kit: startup has neither fed_client.json nor fed_server.json")
    return server


def _checked_root(site: str, data_root: Path | None, in_container: bool) -> str:
    if data_root is None:
        raise KitError(f"{site}: say where the images are: --data-root DIR")
    if not data_root.is_absolute():
        raise KitError(f"{site}: data root {data_root} is a relative path; give an absolute one")
    if not in_container and not data_root.is_dir():
        raise KitError(
            f"{site}: data root {data_root} is not a folder here (a path inside a container: --in-container)"
        )
    if not in_container and not os.access(data_root, os.R_OK | os.X_OK):
        raise KitError(f"{site}: data root {data_root} cannot be read by this user")
    return str(data_root)


def _checked_names(site: str, names: Names) -> Settings:
    """The properties that say how a site names its data; `harmofl preflight` looks at them once more."""
    try:
        re.compile(names.patient_pattern or "")
    except re.error as error:
        raise KitError(f"{site}: --patient-pattern is no regular expression ({error})") from None
    if names.folder is not None and not re.fullmatch(r"[^./\\][^/\\]*", names.folder):
        raise KitError(f"{site}: --folder {names.folder}: give the name of a folder in the data root, no path")
    if names.centers is not None and (not names.centers or min(names.centers) < 0):
        raise KitError(f"{site}: --centers are whole numbers of 0 or more, as the column center has them")
    said = names._asdict() | {"centers": None if names.centers is None else list(names.centers)}
    return {key: value for key, value in said.items() if value is not None}


def _site_files(kit: Path, data_root: str, preinstalled: bool, noise: Noise | None) -> dict[str, Settings]:
    privacy = _template("privacy.json" if noise is None else "privacy_with_noise.json")
    properties = privacy["scopes"][0]["properties"]
    properties["data_root"] = data_root
    if noise is not None:
        if not 0 < noise.relative_clip <= MOST_CLIP:
            raise KitError(
                f"{kit.name}: noise needs RELATIVE_CLIP above 0 and up to {MOST_CLIP:g}, in multiples of a scale that "
                "fits every job (0.8 is a good start)"
            )
        if noise.epsilon <= 0 or not 0 < noise.delta < 1:
            raise KitError(f"{kit.name}: noise needs EPSILON above 0 and DELTA between 0 and 1")
        properties["amplitude_noise"] = noise._asdict()
    resources = _laid_over(_default_resources(kit), _template("resources_additions_site.json"))
    return {"privacy.json": privacy, **_common_files(preinstalled), "resources.json": resources}


def _relay_files(kit: Path, preinstalled: bool) -> dict[str, Settings]:
    resources = _laid_over(_default_resources(kit), _template("resources_additions_site.json"))
    return {**_common_files(preinstalled), "resources.json": resources}


def _server_files(kit: Path, preinstalled: bool, storage: Path | None) -> dict[str, Settings]:
    if storage is not None and not storage.is_absolute():
        raise KitError(f"server: storage {storage} is a relative path; give an absolute one")
    resources = _laid_over(_default_resources(kit), _template("resources_additions_server.json"))
    _store_outside_tmp(resources, storage, kit)
    return {**_common_files(preinstalled), "resources.json": resources}


def _common_files(preinstalled: bool) -> dict[str, Settings]:
    policy = "authorization_preinstalled.json" if preinstalled else "authorization_byoc.json"
    return {"authorization.json": _template(policy), "log_config.json": _template("log_config.json")}


def _store_outside_tmp(resources: Settings, storage: Path | None, kit: Path) -> None:
    """Move job and snapshot storage; paths that a container's kit has already been given stay."""
    try:
        snapshots = resources["snapshot_persistor"]["args"]["storage"]["args"]
        jobs = next(part["args"] for part in resources["components"] if part["id"] == "job_manager")
        places = [(snapshots, "root_dir", SNAPSHOT_STORAGE), (jobs, "uri_root", JOB_STORAGE)]
        for settings, key, folder in places:
            if storage is not None or Path(settings[key]).is_relative_to(TEMPORARY_STORAGE):
                settings[key] = str((storage or kit) / folder)
    except (KeyError, TypeError, StopIteration):
        raise KitError(
            f"{kit.name}: local/resources.json.default lacks the job_manager or snapshot_persistor of FLARE 2.9"
        ) from None


def _laid_over(settings: Settings, additions: Settings) -> Settings:
    """`settings` with the entries of `additions`: lists grow, everything else is replaced."""
    merged = dict(settings)
    for key, value in additions.items():
        old = merged.get(key)
        if isinstance(value, list) and isinstance(old, list):
            merged[key] = old + [entry for entry in value if entry not in old]
        else:
            merged[key] = value
    return merged


def _default_resources(kit: Path) -> Settings:
    return _read(kit / "local" / "resources.json.default")


def _template(name: str) -> Settings:
    return _read(TEMPLATES / name)


def _read(path: Path) -> Settings:
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise KitError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # the latter where it is nested too deeply
        raise KitError(f"{path} is not JSON: {error}") from None
    if not isinstance(settings, dict):
        raise KitError(f"{path} holds no JSON object")
    return settings


def _says(path: Path, text: str) -> bool:
    """True where the file says the same, whatever its layout."""
    try:
        return bool(json.loads(path.read_text(encoding="utf-8")) == json.loads(text))
    except (OSError, ValueError, RecursionError):
        return False


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)  # a running site may read at any time
    except OSError as error:
        raise KitError(f"{path} cannot be written: {error.strerror}") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Set up one kit; returns 0, or 2 where it cannot be done, with one line that says why."""
    options = _parser().parse_args(argv)
    try:
        written = prepare_kit(
            options.kit,
            data_root=options.data_root,
            preinstalled=options.preinstalled,
            noise=Noise(*options.noise) if options.noise else None,
            limits=options.limits,
            names=_names(options),
            storage=options.storage,
            in_container=options.in_container,
            relay=options.relay,
            force=options.force,
        )
    except KitError as error:
        sys.stderr.write(f"prepare_kit: {error}\n")
        return 2
    for path in written:
        sys.stdout.write(f"wrote {path}\n")
    sys.stdout.write("restart a running site for this to hold\n" if written else "nothing to change\n")
    return 0


def _names(options: argparse.Namespace) -> Names | None:
    names = Names(options.patient_pattern, options.folder, tuple(options.centers) if options.centers else None)
    return names if names != Names() else None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Set up the startup kit of a site or the server for HarmoFL.")
    parser.add_argument("kit", type=Path, metavar="KIT", help="folder with startup and local")
    parser.add_argument("--data-root", type=Path, metavar="DIR", help="absolute folder of this site's images")
    parser.add_argument(
        "--in-container", action="store_true", help="DIR is a path inside the container of a job: do not look for it"
    )
    parser.add_argument(
        "--relay", action="store_true", help="a site without images that stands above others and sums their answers"
    )
    parser.add_argument("--preinstalled", action="store_true", help="refuse jobs that bring their own code")
    parser.add_argument(
        "--noise",
        type=float,
        nargs=3,
        metavar=("RELATIVE_CLIP", "EPSILON", "DELTA"),
        help="noise on the amplitude that leaves this site, for example 0.8 1 1e-5",
    )
    parser.add_argument(
        "--limit",
        dest="limits",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="what a job may ask of this site, for example minimum_sites=2 for a rehearsal; may be repeated",
    )
    parser.add_argument(
        "--patient-pattern",
        metavar="REGEX",
        help="finds the patient in a case's name, for example '^(P[0-9]+)': where a patient has several cases",
    )
    parser.add_argument("--folder", metavar="NAME", help="the folder in DIR that is this site's, if not its own name")
    parser.add_argument(
        "--centers", type=int, nargs="+", metavar="N", help="rows of metadata.csv that are this site's, by their center"
    )
    parser.add_argument("--storage", type=Path, metavar="DIR", help="server: absolute folder for jobs (default: KIT)")
    parser.add_argument("--force", action="store_true", help="replace files that say something else")
    return parser


if __name__ == "__main__":
    sys.exit(main())
