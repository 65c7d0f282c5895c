"""`harmofl plan --relays`: the arithmetic by hand, the parts that are measured, and what is refused."""

import pytest

from harmofl.app.cli import main
from harmofl.app.forecast import MODELS_AT_SERVER, forecast
from harmofl.app.job import JobError
from harmofl.app.plan import experiment_of
from harmofl.app.relay_load import MODELS_AT_RELAY, RelayLoad, SumParts, check_relays, measure_sums, relay_load
from tests.unit.app.test_plan import PARTS

SUMS = SumParts(size=2000, make=0.5, merge=1.5)


def load(sites: int, relays: int, rate: float) -> RelayLoad:
    experiment = experiment_of("unet", [])
    flat = forecast(PARTS, experiment, sites=sites, images=1, validation=0, server_rate=rate, site_rate=rate)
    return relay_load(PARTS, SUMS, flat, sites=sites, relays=relays, server_rate=rate, relay_rate=rate)


def test_a_tree_by_hand() -> None:
    found = load(1000, 10, rate=100.0)
    assert found.behind == 100
    # without relays: 1000 sites x 1000 bytes down and 500 up at 100 bytes a second, an answer in 0.25 + 0.75 s
    assert (found.flat.down, found.flat.up) == (1_000_000, 500_000)
    assert (found.flat.line, found.flat.summing) == (15_000, 1000)
    # the server with relays: 10 x 1000 bytes down, 10 sums of 2000 up, 1.5 s each
    assert (found.root.down, found.root.up, found.root.line, found.root.summing) == (10_000, 20_000, 300, 15)
    # a relay: 100 sites x (1000 + 500), and its own task and sum, 1000 + 2000; 100 answers, then 0.5 s for its sum
    assert (found.relay.down, found.relay.up, found.relay.line) == (100_000, 50_000, 1530)
    assert found.relay.summing == 100.5
    assert found.root.memory == 20_000 + (MODELS_AT_SERVER + 2) * 900
    assert found.relay.memory == 10_000 + MODELS_AT_RELAY * 900
    assert found.bottleneck == "a relay's line"


def test_who_bounds_the_round() -> None:
    fast = 1e9  # lines take no time: 100 answers at a relay against 10 sums at the server, and then the other way round
    assert load(1000, 10, fast).bottleneck == "a relay's sum"
    assert load(1000, 500, fast).bottleneck == "the server's sum"
    assert load(1000, 500, 100.0).bottleneck == "the server's line"


def test_sites_that_no_number_of_relays_divides() -> None:
    assert load(11, 4, 1.0).behind == 3


@pytest.mark.parametrize(
    ("sites", "relays", "settings", "said"),
    [
        (2, 3, [], "--relays 3: there are 2 sites"),
        (4096, 3, [], "a mean is of at most 4095 sites"),
        (9, 3, ["federation.aggregation=median", "federation.minimum_sites=3"], "needs the difference of each site"),
    ],
)
def test_a_tree_that_no_run_can_have_is_refused(sites: int, relays: int, settings: list[str], said: str) -> None:
    with pytest.raises(JobError, match=said):
        check_relays(relays, sites, experiment_of("unet", settings))


def test_the_command_refuses_before_it_measures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--sites", "2", "--relays", "3", "--bandwidth", "1Gbit", "--model", "unet"]) == 2
    assert "a relay needs one at least" in capsys.readouterr().err


def test_a_partial_sum_is_measured() -> None:
    experiment = experiment_of("unet", ["network.width=4"])
    sums = measure_sums(experiment)
    values = 8 * sum(value.numel() for value in _network(experiment).state_dict().values() if value.is_floating_point())
    # 8 bytes a value, and a header an entry
    assert values < sums.size < 1.3 * values
    assert sums.make > 0 and sums.merge > 0


def _network(experiment):  # type: ignore[no-untyped-def]
    from harmofl.tasks import untrained_network

    return untrained_network(experiment)
