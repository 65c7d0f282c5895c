"""A startup kit: what it is, and what its site says in `local/`."""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from harmofl.app.job import JobError
from harmofl.app.silence import flare_silent
from harmofl.flare.progress import FINDINGS
from harmofl.flare.site import SiteError, state_root
from harmofl.flare.site_settings import NOISE, RULES, setting_problems
from harmofl.sections import one_line, parse_json

WORKSPACE_VARIABLE = "NVFL_WORKSPACE"  # where start.sh runs a kit that lies in a read-only folder
SAMPLE = "provisioning/site/privacy.json"
NOISE_SAMPLE = "provisioning/site/privacy_with_noise.json"
FILTERS = "harmofl.flare.filters."


class KitError(JobError):
    """A folder that is not a startup kit, or a file of it that cannot be read; one line with the fix."""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at: what was seen and, where something has to be done, the fix."""

    state: Literal["ok", "note", "warning", "error"]
    subject: str
    message: str
    fix: str = ""

    def __str__(self) -> str:
        """Return the check as one line."""
        line = f"{self.state}: {self.subject}: {self.message}"
        return one_line(" ".join((f"{line}; {self.fix}" if self.fix else line).split()))


@dataclass(frozen=True)
class Kit:
    """The startup kit of a server, a site or a person, as its startup files describe it.

    Attributes:
        folder: holds `startup` and `local`.
        kind: whose kit it is.
        name: a site's or a person's name; for a server its TLS identity.
        project: name of the consortium's project.
        host: where the server is reached; for a server's own kit the name that it was given.
        ports: those of the server, one or two.
        scheme: http, grpc or tcp.
        identity: name in the server's certificate.
    """

    folder: Path
    kind: Literal["server", "client", "admin"]
    name: str
    project: str
    host: str
    ports: tuple[int, ...]
    scheme: str
    identity: str

    @property
    def startup(self) -> Path:
        """The files that provisioning wrote and nobody changes."""
        return self.folder / "startup"

    @property
    def certificate(self) -> Path:
        """The kit's own certificate."""
        return self.startup / ("server.crt" if self.kind == "server" else "client.crt")

    @property
    def key(self) -> Path:
        """The private key that belongs to it."""
        return self.certificate.with_suffix(".key")

    @property
    def root(self) -> Path:
        """The certificate of the project's own authority."""
        return self.startup / "rootCA.pem"

    @property
    def workspace(self) -> Path:
        """Where FLARE writes jobs and logs: the kit itself, unless NVFL_WORKSPACE names another folder."""
        return Path(os.environ.get(WORKSPACE_VARIABLE) or self.folder)

    @property
    def state_root(self) -> Path:
        """Where HarmoFL keeps what must last at this site or server.

        Raises:
            KitError: HARMOFL_STATE_ROOT cannot be used.
        """
        own = "server" if self.kind == "server" else self.name  # jobs call a server so, whatever its name is
        try:
            return state_root(own, self.workspace)
        except SiteError as error:
            raise KitError(str(error)) from None

    def local_file(self, name: str) -> Path:
        """The file of `local/` that FLARE reads: the site's own, else the one that provisioning left as `.default`."""
        own = self.folder / "local" / name
        return own if own.exists() else own.with_name(f"{name}.default")

    def scopes(self) -> list[dict[str, Any]]:
        """The privacy scopes of this site; none where it has none, or none that can be read."""
        try:
            scopes = read_json(self.folder / "local" / "privacy.json").get("scopes")
        except KitError:
            return []
        return [scope for scope in scopes if isinstance(scope, dict)] if isinstance(scopes, list) else []

    def scope(self) -> dict[str, Any]:
        """The default privacy scope; empty where there is none."""
        scopes = self.scopes()
        default = read_json(self.folder / "local" / "privacy.json").get("default_scope") if scopes else None
        return next((scope for scope in scopes if scope.get("name") == default), {})

    def properties(self) -> dict[str, Any]:
        """Properties of the default privacy scope: what this site says about its data and its machine."""
        properties = self.scope().get("properties")
        return properties if isinstance(properties, dict) else {}


def open_kit(folder: Path) -> Kit:
    """Read what a kit is.

    Raises:
        KitError: the folder is not a startup kit.
    """
    folder = folder.resolve()
    kinds = {"server": _server, "client": _client, "admin": _admin}
    found = [kind for kind in kinds if (folder / "startup" / f"fed_{kind}.json").is_file()]
    if not found:
        raise KitError(
            f"{folder}: is not a startup kit (it has no startup/fed_client.json, fed_server.json or fed_admin.json); "
            "name the folder that the operator handed over"
        )
    if len(found) > 1:
        files = ", ".join(f"startup/fed_{kind}.json" for kind in found)
        raise KitError(f"{folder}: holds the startup files of several kits ({files}); copy the kit as handed over")
    path = folder / "startup" / f"fed_{found[0]}.json"
    try:
        return kinds[found[0]](folder, read_json(path))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, KitError):
            raise
        raise KitError(f"{path}: is not as provisioning writes it ({error!r}); ask the operator for the kit") from None


def _server(folder: Path, settings: dict[str, Any]) -> Kit:
    server = settings["servers"][0]
    host, port = server["service"]["target"].rsplit(":", 1)
    ports = tuple(dict.fromkeys((int(port), int(server["admin_port"]))))
    name, scheme = server["admin_server"], server["service"]["scheme"]
    return Kit(folder, "server", name, server["name"], host, ports, scheme, name)


def _client(folder: Path, settings: dict[str, Any]) -> Kit:
    server = settings["servers"][0]
    host, port = server["service"]["target"].rsplit(":", 1)
    name = settings["client"]["fqsn"].rsplit(".", 1)[-1]  # behind a relay it names the way to the site
    scheme, identity = server["service"]["scheme"], server["identity"]
    return Kit(folder, "client", name, server["name"], host, (int(port),), scheme, identity)


def _admin(folder: Path, settings: dict[str, Any]) -> Kit:
    admin = settings["admin"]
    name, project, host, port = (admin[key] for key in ("username", "project_name", "host", "port"))
    return Kit(folder, "admin", name, project, host, (int(port),), admin["scheme"], admin["server_identity"])


def read_json(path: Path) -> dict[str, Any]:
    """Read one JSON object.

    Raises:
        KitError: there is none; one line with the fix.
    """
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise KitError(f"{path}: cannot be read ({error.strerror}); copy it from the kit as handed over") from None
    except ValueError as error:
        raise KitError(f"{path}: is not JSON ({error}); correct that place") from None
    if not isinstance(content, dict):
        raise KitError(f"{path}: holds no JSON object; fix it")
    return content


def check_policy(kit: Kit) -> Iterator[Check]:
    """Read what the site says in `local/` as FLARE will: its privacy and its log files."""
    for look in (_privacy, _logging) if kit.kind == "client" else ():
        try:
            yield from look(kit)
        except KitError as error:
            yield Check("error", "local", str(error))


def _privacy(kit: Kit) -> Iterator[Check]:
    path = kit.folder / "local" / "privacy.json"
    sample = f"start from {SAMPLE}"
    if not path.exists():
        yield Check("warning", path.name, "is missing, so no filter watches over the amplitude", sample)
        return
    read_json(path)
    problems = [*_filters(kit), *_values(kit.properties())]
    problems = problems or [*_refused(path)]
    if not any(problem.state == "error" for problem in problems) and not kit.scope():
        problems += [Check("error", path.name, "default_scope names none of its scopes", sample)]
    yield from problems
    if not problems:
        yield Check("ok", path.name, f"scope {kit.scope()['name']}, its filters can be imported")


def _filters(kit: Kit) -> Iterator[Check]:
    """Import each filter of the default scope: FLARE does so before any job's code is there."""
    held = [kit.scope().get(key) for key in ("task_result_filters", "task_data_filters")]
    entries = [entry for filters in held if isinstance(filters, list) for entry in filters]
    paths = [str(entry.get("path", "")) for entry in entries if isinstance(entry, dict)]
    for path in paths:
        module, _, kind = path.rpartition(".")
        try:
            with _local_code(kit):
                getattr(import_module(module), kind)
        except Exception as error:  # whatever a module does when it is imported
            fix = "install the package at this site, or put the filter into local/custom"
            yield Check("error", "privacy.json", f"filter {path} cannot be imported ({error})", fix)
    if kit.scope() and not any(path.startswith(FILTERS) for path in paths):
        noise = "amplitude_noise" in kit.properties()
        message = "no filter of harmofl.flare.filters among task_result_filters: the amplitude leaves as it is"
        yield Check("error" if noise else "warning", "privacy.json", message, f"add {FILTERS}AmplitudeFilter")


def lists_own_filter(kit: Kit, scope: str) -> bool:
    """Whether a scope's filters of results have one of this package."""
    held = next((entry for entry in kit.scopes() if entry.get("name") == scope), {}).get("task_result_filters")
    entries = held if isinstance(held, list) else []
    return any(isinstance(entry, dict) and str(entry.get("path", "")).startswith(FILTERS) for entry in entries)


@contextmanager
def _local_code(kit: Kit) -> Iterator[None]:
    """Let the site's own code be imported as FLARE does."""
    place = str(kit.folder / "local" / "custom")
    sys.path.append(place)
    try:
        yield
    finally:
        sys.path.remove(place)


def _values(properties: Mapping[str, Any]) -> Iterator[Check]:
    """Read the scope's properties as the site will."""
    for problem in setting_problems(properties):
        message = str(problem).removeprefix("local/privacy.json: ")
        if problem.name in ("device", "data_root"):  # have sections of their own
            continue
        if problem.name in RULES:
            message, fix = f"{problem.name} is {json.dumps(properties[problem.name])}", message
        else:
            fix = f"see {NOISE_SAMPLE if problem.name == NOISE else SAMPLE}"
        yield Check("error", "privacy.json", message, fix)


def _refused(path: Path) -> Iterator[Check]:
    from nvflare.private.fed.app.fl_conf import create_privacy_manager

    place = SimpleNamespace(get_site_privacy_file_path=lambda: str(path))
    try:
        with flare_silent():
            create_privacy_manager(place, names_only=True)
    except Exception as error:  # FLARE's parser raises many kinds
        fix = f"start from {SAMPLE}"
        yield Check("error", path.name, f"FLARE refuses it ({error})", fix)


def _logging(kit: Kit) -> Iterator[Check]:
    path = kit.local_file("log_config.json")
    loggers = read_json(path).get("loggers")
    logger = loggers.get(FINDINGS.name) if isinstance(loggers, dict) else None
    if isinstance(logger, dict) and logger.get("handlers") and logger.get("propagate") is False:
        yield Check("ok", path.name, "lines that may name files or patients go to a file of their own")
        return
    message = f"logger {FINDINGS.name} has no file of its own, so log.txt may name files or patients"
    yield Check("note", path.name, message, "start from provisioning/site/log_config.json")


def check_log_streams(kit: Kit) -> Iterator[Check]:
    """Whether a job may send this site's logs away."""
    path = kit.local_file("resources.json")
    try:
        said = read_json(path).get("allow_log_streaming")
    except KitError:  # said where its classes are looked at
        return
    if said is not False:
        message = "allow_log_streaming is not false: a job may send logs of this site, findings.txt too, to the server"
        yield Check("warning", path.name, message, "set it to false (provisioning/site/prepare_kit.py does it)")
