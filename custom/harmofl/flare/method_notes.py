"""What a run's method does to its global model, in sentences for the screen and for whoever reads the results."""

from harmofl.experiment import Experiment
from harmofl.flare.server_run import ServerRun
from harmofl.flare.server_store import BEST_MODEL, FINAL_MODEL
from harmofl.sections import names_text


def method_notes(run: ServerRun) -> list[str]:
    """One line for each thing that a reader of the scores or a user of the model files must know."""
    return _layer_notes(run) + _batch_notes(run.experiment) + _aggregation_notes(run.experiment)


def _layer_notes(run: ServerRun) -> list[str]:
    experiment = run.experiment
    federation, whose = experiment.federation, f"method {experiment.method}"
    if federation.pooled_data:
        return [
            f"{whose}: no federation: {run.expected[0]} trained on the training data of all sites, which only a "
            "simulation can; the scores are of each site's own cases"
        ]
    if federation.local_layers == "all":
        return [
            f"{whose}: no weights travel; each site's scores are of its own model, which stays at the site, and there "
            f"is no global model: no {BEST_MODEL}, and {FINAL_MODEL} holds only what a resumed run needs"
        ]
    if federation.local_layers == "norm" and not run.partition.local:
        return [
            f"{whose}: network {experiment.network.name} with network.norm '{experiment.network.norm}' has no norm "
            "layers with parameters or statistics, so no layer is local and this run equals plain averaging (fedavg)"
        ]
    if federation.local_layers == "norm":
        return [
            f"{whose}: norm layers stay at each site and the scores are with each site's own; those in {BEST_MODEL} "
            f"and {FINAL_MODEL} have their initial values, so these files have no usable norm layers: do not score or "
            "use them alone"
        ]
    return []


def _batch_notes(experiment: Experiment) -> list[str]:
    """What batch statistics without running ones mean for a score."""
    if experiment.network.norm != "batch_stats":
        return []
    return [
        "network.norm 'batch_stats': the slices or tiles of one case are normalized with each other, "
        f"{experiment.training.batch_size} at a time (training.batch_size), so that a score holds for that number; no "
        "other case changes it"
    ]


def _aggregation_notes(experiment: Experiment) -> list[str]:
    """What a mean of the middle sites costs."""
    if experiment.federation.aggregation == "mean":
        return []
    return [
        f"federation.aggregation '{experiment.federation.aggregation}': every site counts the same, so that one with "
        "more images than the others loses the weight they would give it, and what one site alone has learned is left "
        "out; the server holds the differences of all sites until a round has closed"
    ]


def amplitude_notes(run: ServerRun) -> list[str]:
    """One line about the sites that are not in the global amplitude; none where all are or there is none yet."""
    without = [site for site in run.expected if site not in run.amplitude_sites]
    if run.amplitude is None or not without:
        return []
    return [
        f"{names_text(without)} sent no amplitude (fewer training patients than amplitude.minimum_cases or its own "
        "limit, held back by its ledger of earlier releases, or no answer); training and scores there are with the "
        f"global one, of {names_text(run.amplitude_sites)}"
    ]


def privacy_note(run: ServerRun) -> str | None:
    """What leaves a site where it is not weight differences; None where it is."""
    if run.experiment.federation.pooled_data:
        return "none: a simulation of all data in one place, where nothing is kept apart"
    if not run.has_global_model:
        return "no formal guarantee: no noise is added; only numbers leave a site: counts, losses and scores"
    return None
