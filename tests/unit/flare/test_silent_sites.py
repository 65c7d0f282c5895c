"""A site that may send no amplitude trains with the global one and stops nobody while enough others send theirs."""

from types import SimpleNamespace

import pytest
from nvflare.apis.impl.bcast_manager import _KEY_MIN_RESPS
from toy_answers import difference, statistic

from harmofl.flare.controller import HarmoFLScatterAndGather
from harmofl.flare.method_notes import amplitude_notes
from harmofl.flare.record import close_round, write_evidence
from harmofl.flare.server_store import BEST_MODEL, FINAL_MODEL
from harmofl.flare.wire import UpdateMessage, pack_update

PUBLISHED = {"amplitude.preset": "as_published"}


@pytest.fixture
def gather(make_run, make_context, numbers, monkeypatch):
    """Let the controller gather from A, B and C; gives the run, how many answers it waited for and why it failed."""

    def gathered(changes, silent):
        run, controller = make_run(changes), HarmoFLScatterAndGather()
        waited, panics, counts = [], [], {"cases": numbers["cases"]}
        controller.run = run
        monkeypatch.setattr(controller, "system_panic", lambda reason, fl_ctx: panics.append(reason))

        def broadcast_and_wait(task, fl_ctx, min_responses, **_):
            task.props[_KEY_MIN_RESPS] = min_responses
            for name in run.expected:
                amplitude = None if name in silent else statistic(run, -2.0)
                result, site = pack_update(UpdateMessage(None, amplitude, counts)), SimpleNamespace(name=name)
                task.result_received_cb(SimpleNamespace(client=site, result=result, task=task), fl_ctx)
            waited.append(task.props[_KEY_MIN_RESPS])

        monkeypatch.setattr(controller, "broadcast_and_wait", broadcast_and_wait)
        controller._gather_amplitude(SimpleNamespace(triggered=False), make_context(run))
        return run, waited[0], panics

    return gathered


# of three sites: the task waits for as many as a round needs, and for so many that enough of them have an amplitude
@pytest.mark.parametrize(
    ("round_needs", "amplitude_needs", "silent", "waits_for"),
    [
        (2, 1, "", 2),
        (2, 1, "A", 2),  # A and B are the two that a round needs, and B's amplitude is enough
        (2, 1, "AB", 3),  # C must answer
        (2, 2, "A", 3),
        (1, 2, "A", 3),
        (3, 1, "AB", 3),
    ],
)
def test_a_silent_site_counts_as_an_answer(gather, round_needs, amplitude_needs, silent, waits_for):
    minimums = {"federation.minimum_sites": round_needs, "amplitude.minimum_sites": amplitude_needs}
    run, waited, panics = gather(minimums, silent)
    assert (waited, panics) == (waits_for, [])
    assert run.amplitude_sites == [site for site in "ABC" if site not in silent]
    # what a silent site says it has bounds what it may say later, too
    assert run.first_counts.keys() == set(run.amplitude_sites) | set(silent)


def test_too_few_amplitudes_end_the_job_and_say_who_sent_none(gather):
    run, _, (panic,) = gather({"amplitude.minimum_sites": 2}, "AC")
    assert panic.startswith(
        "the amplitude of 1 site arrived, amplitude.minimum_sites is 2 (A: sent none; C: sent none)"
    )
    assert run.amplitude is None


@pytest.mark.parametrize(("needs", "beyond"), [(1, False), (2, True)])
def test_an_amplitude_that_comes_with_weights_waits_in_the_same_way(opened, answer, needs, beyond):
    aggregator, run, context = opened(PUBLISHED | {"federation.minimum_sites": 2, "amplitude.minimum_sites": needs})
    controller = HarmoFLScatterAndGather()
    controller.run, controller.aggregator = run, aggregator
    assert aggregator.accept(answer("A", difference()), context)
    assert controller._silent_beyond_need("A") == beyond
    assert aggregator.accept(answer("B", difference(), amplitude=statistic(run)), context)
    assert not controller._silent_beyond_need("B")
    run.amplitude = statistic(run)
    assert not controller._silent_beyond_need("A")


def test_results_say_who_trained_with_the_amplitude_of_others(make_run, numbers):
    run = make_run()
    run.numbers = {site: dict(numbers) for site in run.expected}
    assert amplitude_notes(run) == []
    run.amplitude, run.amplitude_sites = statistic(run), ["A", "C"]
    close_round(run, 0, ["A", "B", "C"])
    for name in (BEST_MODEL, FINAL_MODEL):
        (run.folder / name).write_bytes(b"")
    lines = write_evidence(run, {})
    (said,) = [line for line in lines if "amplitude" in line]
    assert said.startswith("WARNING: B sent no amplitude") and said.endswith("with the global one, of A, C")
    run.amplitude_sites = ["A", "B", "C"]
    assert amplitude_notes(run) == []
