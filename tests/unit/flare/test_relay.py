"""A tree of relays, messages serialized as FLARE does: its model is that of the flat run, bit for bit."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nvflare.apis.client import Client
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, ReservedKey, ReturnCode
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.apis.job_def import JobMetaKey
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.apis.utils.event import fire_event_to_components
from nvflare.app_common.abstract.model import make_model_learnable
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.decomposers import common_decomposers
from nvflare.fuel.utils import fobs
from nvflare.fuel.utils.job_utils import build_client_hierarchy

from harmofl.core.training import arrays_sha256
from harmofl.experiment import ExperimentError, resolve, set_key
from harmofl.flare import executor as executor_module
from harmofl.flare.aggregator import HarmoFLAggregator
from harmofl.flare.executor import HarmoFLExecutor
from harmofl.flare.packed_arrays import PackedArrays
from harmofl.flare.record import close_round
from harmofl.flare.relay import RelayTask
from harmofl.flare.relay_message import read_measure
from harmofl.flare.round_norms import round_measure
from harmofl.flare.server_run import _KEY, ServerRun, relays_of
from harmofl.flare.task_header import TRAIN_TASK
from harmofl.flare.wire import Arrays, ModelMessage, UpdateMessage, error_reply, pack_model, pack_update

TREE = {f"relay-{relay}": [f"S{relay}{site}" for site in range(4)] for relay in range(3)}
SITES = [site for sites in TREE.values() for site in sites]
Change = Callable[[str, Any], Any]


class Federation:
    """A server, flat or above relays, whose sites answer what is given."""

    def __init__(self, written: dict[str, Any], folder: Path, relays: dict[str, list[str]]) -> None:
        folder.mkdir()
        self.folder, self.tree, self.half = folder, relays, False
        self.run = ServerRun(resolve(written), False, folder, sorted(SITES), run_id="0123abcd")
        self.run.relays = {relay: frozenset(sites) for relay, sites in relays.items()}
        self.weights: Arrays = self.run.initial_weights()
        self.aggregator = HarmoFLAggregator()
        self.context: FLContext = FLContextManager(None, "server", "job", {}, {}).new_context()
        self._set(_KEY, self.run)

    def round(self, number: int, answers: dict[str, Shareable], alter: Change = lambda _, told: told) -> None:
        """One round; `alter` changes what a relay sends."""
        self._set(AppConstants.CURRENT_ROUND, number)
        self._set(AppConstants.GLOBAL_MODEL, make_model_learnable(self.weights, {}))
        self.run.begin(f"in round {number}")
        self.run.model_sha256 = arrays_sha256(self.weights)
        behind = {site for sites in self.tree.values() for site in sites}
        for site in answers.keys() - behind:
            self._accept(site, answers[site], number)
        for relay, sites in self.tree.items():
            gathered = self._gathered(number, sites, answers)
            self._accept(relay, alter(relay, fobs.loads(fobs.dumps(gathered))), number)
        close_round(self.run, number, sorted(self.aggregator.accepted))
        mean = self.aggregator._mean
        assert mean is not None
        self.weights = self.run.rule.next_model(self.weights, mean.mean())
        self.aggregator.reset(self.context)

    def _gathered(self, number: int, sites: list[str], answers: dict[str, Shareable]) -> Shareable:
        sent = {name: value.astype(np.float16) for name, value in self.weights.items()} if self.half else self.weights
        task = self.run.header(number).attach(pack_model(ModelMessage(sent)))
        round_measure(self.run).attach(task)
        received = fobs.loads(fobs.dumps(task))
        folder = self.folder / sites[0]
        folder.mkdir(exist_ok=True)
        at_relay = RelayTask(
            self.run.experiment, self.run.header(number), TRAIN_TASK, received, sites=sites, folder=folder
        )
        for site in sites[::-1]:
            if site in answers:
                at_relay.take(site, fobs.loads(fobs.dumps(answers[site])))
        assert at_relay.waiting == [site for site in sites if site not in answers]
        return at_relay.result()

    def _accept(self, sender: str, answer: Shareable, number: int) -> None:
        answer.add_cookie(AppConstants.CONTRIBUTION_ROUND, number)
        answer.set_peer_props({ReservedKey.IDENTITY_NAME: sender})
        self.aggregator.accept(answer, self.context)

    def _set(self, key: str, value: Any) -> None:
        self.context.set_prop(key, value, private=True, sticky=True)


def answer(site: str, number: int, weights: Arrays, times: float = 1.0) -> Shareable:
    """A difference as training makes one, of a site's own size and number of images."""
    generator = np.random.default_rng([SITES.index(site), number])

    def change(value: np.ndarray) -> np.ndarray:
        if value.dtype.kind != "f":
            return np.ones_like(value)
        added = (1e-4 * times * generator.standard_normal(value.shape)).astype(np.float32)
        return np.asarray((value + added) - value)

    cases = 3 + SITES.index(site)
    numbers = {"cases": {"training": cases}, "images": 4 * cases, "steps": -(-4 * cases // 8), "loss": 0.5}
    numbers |= {"validation": 0.5 + SITES.index(site) / 100, "received_sha256": arrays_sha256(weights)}
    return pack_update(UpdateMessage({name: change(value) for name, value in weights.items()}, None, numbers))


@pytest.fixture
def federations(written: dict[str, Any], tmp_path: Path) -> Callable[..., tuple[Federation, Federation]]:
    """The same run flat and above three relays with four sites each."""
    common_decomposers.register()

    def make(**settings: Any) -> tuple[Federation, Federation]:
        changes = {"method": "fedavg", "network.width": 2, "training.batch_size": 8, "federation.rounds": 3}
        for key, value in {**changes, **settings}.items():
            set_key(written, key.replace("__", "."), value)
        return Federation(written, tmp_path / "flat", {}), Federation(written, tmp_path / "tree", TREE)

    return make


@pytest.mark.parametrize(
    "settings", [{}, {"federation__weights": "samples"}, {"method": "fednova"}, {"federation__norm_bound": None}]
)
def test_the_model_of_a_tree_is_that_of_the_flat_run(federations: Any, settings: dict[str, Any]) -> None:
    flat, tree = federations(**settings)
    for number in range(3):
        # in the last round one site's difference is 1000 times as long, and scaled where the run bounds norms
        sent = {
            site: answer(site, number, flat.weights, 1000.0 if number == 2 and site == "S12" else 1.0) for site in SITES
        }
        flat.round(number, dict(sent))
        tree.round(number, dict(sent))
        assert arrays_sha256(tree.weights) == arrays_sha256(flat.weights)
    one, other = flat.run.rounds[2], tree.run.rounds[2]
    assert other.sites_accepted == SITES and (
        other.norm,
        other.scaled,
        other.outliers,
        other.steps,
        other.validation,
    ) == (
        one.norm,
        one.scaled,
        one.outliers,
        one.steps,
        one.validation,
    )
    assert list(one.outliers) == ["S12"] and one.bytes_sent == other.bytes_sent
    assert set(other.cosine) == set(SITES)


def test_a_model_that_travels_in_float16_is_the_same_at_a_relay(federations: Any) -> None:
    flat, tree = federations()
    halves = {name: value.astype(np.float16).astype(np.float32) for name, value in flat.weights.items()}
    flat.weights, tree.weights, tree.half = halves, dict(halves), True
    sent = {site: answer(site, 0, halves) for site in SITES}
    flat.round(0, dict(sent))
    tree.round(0, dict(sent))
    assert tree.run.rounds[0].sites_accepted == SITES
    assert arrays_sha256(tree.weights) == arrays_sha256(flat.weights)


def test_sites_that_failed_or_are_silent_are_named_with_their_relay(federations: Any) -> None:
    _, tree = federations()
    sent = {site: answer(site, 0, tree.weights) for site in SITES}
    sent["S01"] = error_reply("no_data", "site S01 has no case")
    del sent["S23"]
    tree.round(0, sent)
    record = tree.run.rounds[0]
    assert record.sites_accepted == [site for site in SITES if site not in ("S01", "S23")]
    assert record.sites_refused == {
        "S01": "at its relay relay-0: no_data: site S01 has no case",
        "S23": "at its relay relay-2: no answer at its relay",
    }


def test_a_site_behind_a_relay_does_not_answer_to_the_server(federations: Any) -> None:
    _, tree = federations()
    sent = {site: answer(site, 0, tree.weights) for site in SITES}
    tree.run.begin("in round 0")
    tree._set(AppConstants.CURRENT_ROUND, 0)
    tree._accept("S01", sent["S01"], 0)
    assert tree.aggregator.accepted == [] and "not a site of this job that answers" in tree.run.refused["S01"]


def altered(key: str, value: Any) -> Change:
    """Relay-1's message with another value in its sum or notes."""

    def alter(relay: str, told: Shareable) -> Shareable:
        if relay != "relay-1":
            return told
        meta, data = told["DXO"]["meta"], told["DXO"]["data"]
        if key == "notes":
            meta["harmofl.notes"]["S11"].update(value)
        elif key == "site":
            data["answer." + value] = data.pop("answer.S11")
            meta["harmofl.notes"][value] = meta["harmofl.notes"].pop("S11")
        elif key == "left out":
            data.pop("answer.S11")
            meta["harmofl.notes"].pop("S11")
        elif key == "long":
            for name in data["sum"].data["low"].data["arrays"]:
                data["sum"].data["low"].data["arrays"][name] = data["sum"].data["low"].data["arrays"][name] * 10**6
        else:
            data["sum"].data["plain"][key] = value
        return told

    return alter


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("count", 5, "a sum of 5 differences came with the numbers of 4 sites"),
        ("weight", 9, "the sum has weight 9, its sites have 4 together"),
        ("left out", None, "a sum of 4 differences came with the numbers of 3 sites"),
        ("site", "S01", "S01 is no site of this relay"),
        ("notes", {"norm": -1.0}, "the relay's answer cannot be read"),
        ("notes", {"norm": None}, "the relay does not tell the norm of S11"),
        ("long", None, "look at that relay"),
    ],
)
def test_a_relay_that_lies_is_refused_as_a_whole(federations: Any, key: str, value: Any, said: str) -> None:
    flat, tree = federations()
    sent = {site: answer(site, 0, tree.weights) for site in SITES}
    tree.round(0, dict(sent), altered(key, value))
    left = [site for site in SITES if site not in TREE["relay-1"]]
    assert tree.run.rounds[0].sites_accepted == left and said in tree.run.rounds[0].sites_refused["relay-1"]
    flat.round(0, {site: sent[site] for site in left})
    assert arrays_sha256(tree.weights) == arrays_sha256(flat.weights)


def test_a_task_without_the_measure_of_the_round_is_refused(federations: Any) -> None:
    with pytest.raises(Exception, match="does not say what a relay holds"):
        read_measure(Shareable())


def as_a_relay(fl_ctx_of: str, sites: list[str], folder: Path) -> FLContext:
    """The context of a site that stands above others, as FLARE's job process has it."""
    context = FLContextManager(None, fl_ctx_of, "job", {}, {}).new_context()
    clients = [client(fl_ctx_of, fl_ctx_of), *(client(site, f"{fl_ctx_of}.{site}") for site in sites)]
    for key, value in (
        (ReservedKey.IS_LEAF, False),
        (FLContextKey.CLIENT_HIERARCHY, build_client_hierarchy(clients)),
        (FLContextKey.APP_ROOT, str(folder)),
        (FLContextKey.WORKSPACE_ROOT, str(folder)),
        (FLContextKey.SIMULATE_MODE, True),
    ):
        context.set_prop(key, value, private=True)
    return context


@pytest.mark.parametrize("aborted", [False, True])
def test_the_executor_of_a_relay_waits_for_its_sites_and_sends_their_sum(
    federations: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, aborted: bool
) -> None:
    flat, tree = federations()
    run, sites, relay = tree.run, TREE["relay-1"], "relay-1"
    sent = {site: answer(site, 0, tree.weights) for site in SITES}
    monkeypatch.setattr(executor_module, "resolve_job", lambda *_: run.experiment)
    run.model_sha256 = arrays_sha256(tree.weights)
    task = run.header(0).attach(pack_model(ModelMessage(tree.weights)))
    round_measure(run).attach(task)
    task = fobs.loads(fobs.dumps(task))
    task.set_header(ReservedKey.TASK_ID, "task-1")
    assert type(task["DXO"]["data"]) is dict
    executor, context, signal = HarmoFLExecutor(), as_a_relay(relay, sites, tmp_path), Signal()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(executor.execute, TRAIN_TASK, task, context, signal)
        while not task.get_header(ReservedKey.TASK_IS_READY) and not waiting.done():
            time.sleep(0.01)
        for site in sites[: 2 if aborted else 4]:
            deliver(executor, site, sent[site], "task-0")  # of another task: left out
            deliver(executor, site, sent[site], "task-1")
        signal.trigger(True) if aborted else None
        result = waiting.result(timeout=30)
    assert type(task["DXO"]["data"]) is PackedArrays, "as it is handed to the sites"
    assert task.get_header(ReservedKey.TASK_ID) == "task-1"
    if aborted:
        assert result.get_return_code() == ReturnCode.TASK_ABORTED
        return
    tree.round(0, dict(sent), lambda name, told: fobs.loads(fobs.dumps(result)) if name == relay else told)
    flat.round(0, dict(sent))
    assert arrays_sha256(tree.weights) == arrays_sha256(flat.weights)


def deliver(executor: HarmoFLExecutor, site: str, result: Shareable, task_id: str) -> None:
    """An answer, as `ClientRunner` hands it to the executor of a task."""
    told = fobs.loads(fobs.dumps(result))
    told.set_header(ReservedKey.TASK_ID, task_id)
    context, peer = FLContextManager(None, "relay", "job", {}, {}).new_context(), FLContext()
    peer.set_prop(ReservedKey.IDENTITY_NAME, site, private=False)
    context.set_peer_context(peer)
    context.set_prop(FLContextKey.TASK_RESULT, told, private=True, sticky=False)
    fire_event_to_components(EventType.POST_TASK_RESULT_RECEIVED, [executor], context)
    assert context.get_prop(FLContextKey.EVENT_PROCESSED)


def client(name: str, fqsn: str) -> Client:
    """A client as FLARE knows it."""
    made = Client(name, "")
    made.set_fqsn(fqsn)
    return made


def test_who_sums_is_read_from_the_sites_own_names() -> None:
    clients = [client("R", "R"), client("A", "R.A"), client("B", "R.B"), client("C", "C")]
    assert relays_of(clients) == {"R": frozenset({"A", "B"})}
    assert relays_of([client("C", "C")]) == {}
    with pytest.raises(ExperimentError, match="only one level of relays"):
        relays_of([*clients, client("D", "R.A.D")])
    with pytest.raises(ExperimentError, match="Q: the relay of other sites is not connected"):
        relays_of([*clients, client("D", "Q.D")])


def test_relays_are_no_sites_of_a_limit() -> None:
    """A job at two hospitals and two relays is one at two hospitals, whatever the server says of leaves."""
    clients = [client("R", "R"), client("A", "R.A"), client("Q", "Q"), client("B", "Q.B")]
    clients[2].set_is_leaf(False)
    context = FLContext()
    meta = {JobMetaKey.JOB_CLIENTS: [one.to_dict() for one in clients]}
    context.set_prop(FLContextKey.JOB_META, meta, private=True)
    assert executor_module._count_sites(context) == 2
    meta[JobMetaKey.JOB_CLIENTS] = [client(name, name).to_dict() for name in "ABC"]
    assert executor_module._count_sites(context) == 3
