"""By which rules a site's state of a run was made: a run is not resumed with other patients or other rules."""

from harmofl.experiment import RULES, rules_problem
from harmofl.flare.site import SiteError
from harmofl.flare.state import SiteState

_KEPT = "rules"


def keep_rules(state: SiteState) -> None:
    """Keep the rules with the first state of a run; call it before anything else of the run is kept."""
    if state.load_once(_KEPT) is None:
        state.save_once(_KEPT, dict(RULES))


def refuse_other_rules(state: SiteState) -> None:
    """Refuse to resume a run that was begun by other rules; nothing is written.

    Raises:
        SiteError: code `other_rules`, where the state was made by other ones.
    """
    held = state.load_once(_KEPT)
    if held is None and state.is_empty:
        return
    if problem := rules_problem(held or {}):
        raise SiteError(
            "other_rules",
            f"this site's state of the run was {problem}; start a new run, or use the harmofl version that made it",
        )
