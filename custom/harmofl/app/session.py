"""A connection to a running federation with the kit of someone who may submit jobs."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nvflare.fuel.flare_api.api_spec import AuthenticationError, NoConnection
from nvflare.fuel.flare_api.flare_api import Session, new_secure_session

from harmofl.app.job import JobError
from harmofl.app.silence import flare_silent, flare_unlogged
from harmofl.sections import parse_json

PATIENCE = 20.0  # seconds to log in; a server that has just started needs some of them


@contextmanager
def connected(kit: Path) -> Iterator[Session]:
    """Log in with a kit and log out again.

    Raises:
        JobError: no kit of a user, no server, or a server that does not know the user.
    """
    path = kit / "startup" / "fed_admin.json"
    try:
        user = parse_json(path.read_text(encoding="utf-8"))["admin"]["username"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise JobError(
            f"{kit}: no kit of a user ({path.name}: {type(error).__name__}); name the folder above startup/ of a lead"
        ) from None
    with flare_unlogged():  # its threads log every failed attempt to connect, now and later
        try:
            with flare_silent():  # FLARE says that it connects
                session = new_secure_session(user, str(kit.absolute()), timeout=PATIENCE)
        except (NoConnection, AuthenticationError, ValueError, OSError) as error:
            raise JobError(
                f"{user} cannot log in ({error or type(error).__name__}); is the server up? "
                f"`harmofl preflight {kit}` tells"
            ) from None
        try:
            yield session
        finally:
            session.close()
