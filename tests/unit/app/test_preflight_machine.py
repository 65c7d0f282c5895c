"""The machine of a kit, with a planted failure of each kind."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from harmofl.app import machine
from harmofl.app.kit import Check, open_kit
from harmofl.app.machine import Demand
from tests.unit.app.provisioned import Provisioning, change, set_privacy

GIB = 2**30
DEMAND = Demand(model=10**6, training=10**8, process=10**8, images=10**7, batch=10**6, workers=0, resources={})
Sleep = Callable[..., int]


@pytest.fixture
def sleep() -> Iterator[Sleep]:
    """Start a process that waits, with more words on its command line, and give its number."""
    running: list[subprocess.Popen[bytes]] = []

    def start(*words: str, code: str = "") -> int:
        program = f"{code}\nprint(flush=True)\nimport time; time.sleep(60)"
        process = subprocess.Popen([sys.executable, "-c", program, *words], stdout=subprocess.PIPE)
        running.append(process)
        assert process.stdout is not None
        process.stdout.readline()  # it runs
        return process.pid

    yield start
    for process in running:
        process.kill()
        process.communicate()


def see(kind: str, kit: Path, *demand: Demand | None) -> list[Check]:
    return list(getattr(machine, f"check_{kind}")(open_kit(kit), *demand))


def flare_of(kit: Path) -> tuple[str, ...]:
    return "-m", "nvflare.private.fed.app.client.client_train", "-m", str(kit)


def test_a_kit_at_rest(site: Path) -> None:
    (check,) = see("running", site)
    assert check.state == "ok"


def test_a_running_site_is_a_warning(site: Path, sleep: Sleep) -> None:
    daemon = sleep(str(site / "startup/sub_start.sh"))
    (site / "daemon_pid.fl").write_text(f"{daemon}\n")
    (site / "pid.fl").write_text(f"{sleep(*flare_of(site))}\n")
    (site / "shutdown.fl").touch()  # it is about to stop: nothing to fix
    checks = see("running", site)
    assert [check.state for check in checks] == ["warning", "warning"]
    assert f"the client is running as process {daemon}" in checks[0].message


def test_a_site_that_runs_without_pid_files_is_a_warning(site: Path, sleep: Sleep) -> None:
    client = sleep(*flare_of(site))
    checks = see("running", site)
    assert [check.state for check in checks] == ["warning"]
    assert f"the client is running as process {client}" in checks[0].message


@pytest.mark.parametrize("content", ["4194304999", "", "word"])
def test_a_stale_pid_file_is_a_warning(site: Path, content: str) -> None:
    (site / "daemon_pid.fl").write_text(content)  # no number is as large: the kernel's limit is 2^22
    stale, at_rest = see("running", site)
    assert stale.state == "warning" and "gone" in stale.message and f"rm {site / 'daemon_pid.fl'}" in stale.fix
    assert at_rest.state == "ok"


@pytest.mark.parametrize("name", ["daemon_pid.fl", "pid.fl"])
def test_a_number_that_another_program_has_now_keeps_the_site_from_starting(site: Path, name: str) -> None:
    (site / name).write_text(str(os.getpid()))
    check = see("running", site)[0]
    assert check.state == "error" and "takes the client for running" in check.message


def test_a_process_that_nobody_reaped_keeps_the_site_from_starting(site: Path) -> None:
    ended = subprocess.Popen(["true"])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and its number is still taken
    (site / "daemon_pid.fl").write_text(str(ended.pid))
    try:
        assert see("running", site)[0].state == "error"
    finally:
        ended.wait()


def test_another_kits_process_is_not_this_one(site: Path, kits: Provisioning, sleep: Sleep) -> None:
    (site / "daemon_pid.fl").write_text(str(sleep(*flare_of(kits.folder / "BIDMC"))))
    assert see("running", site)[0].state == "error"


def test_a_left_over_stop_is_an_error(site: Path) -> None:
    (site / "shutdown.fl").touch()
    (check,) = see("running", site)
    assert check.state == "error" and "stops right after its start" in check.message


def test_ports_free_and_taken_by_another_program(kits: Provisioning, tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        server = kits.copy("server", tmp_path / "server", port=port)
        listener.listen()
        (check,) = see("ports", server)
        assert check.state == "error" and check.subject == f"port {port}"
        assert f"process {os.getpid()} ({psutil.Process().name()})" in check.message
    assert [check.state for check in see("ports", server)] == ["ok"]


def test_a_port_that_this_server_holds_itself_is_a_note(kits: Provisioning, tmp_path: Path, sleep: Sleep) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    server = kits.copy("server", tmp_path / "server", port=port)
    pid = sleep(*flare_of(server), code=f"import socket; held = socket.create_server(('', {port}))")
    (check,) = see("ports", server)
    assert check.state == "note" and f"process {pid}" in check.message


def give_cards(monkeypatch: pytest.MonkeyPatch, *memory: float) -> None:
    cards = [SimpleNamespace(name="card", total_memory=int(size * GIB)) for size in memory]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(cards))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: cards[index])
    manager = "nvflare.app_common.resource_managers.gpu_resource_manager"
    monkeypatch.setattr(f"{manager}.get_host_gpu_ids", lambda: list(range(len(cards))))
    monkeypatch.setattr(f"{manager}.get_host_gpu_memory_total", lambda: [int(size * 1024) for size in memory])


def promise(kit: Path, count: int, memory: float) -> None:
    path = "nvflare.app_common.resource_managers.gpu_resource_manager.GPUResourceManager"
    args = {"num_of_gpus": count, "mem_per_gpu_in_GiB": memory}
    change(kit, "resources.json", components=[{"id": "resource_manager", "path": path, "args": args}])


@pytest.mark.parametrize(
    ("device", "cards", "states"),
    [
        ("auto", [], ["ok", "ok"]),
        ("cpu", [16.0], ["ok", "ok"]),
        ("cuda", [16.0], ["ok", "ok"]),
        ("cuda", [], ["error", "ok"]),
        ("cuda:1", [16.0], ["error", "ok"]),
        ("cuda:0,cuda:1", [16.0], ["error", "ok"]),
        ("cuda:0,cuda:1", [16.0, 16.0], ["ok", "ok"]),
        ("cpu,cpu", [16.0], ["ok", "ok"]),
        ("cuda:0,cuda:0", [16.0], ["error", "ok"]),
        ("gpu", [16.0], ["error", "ok"]),
        (0, [16.0], ["error", "ok"]),
    ],
)
def test_the_gpu_against_the_sites_device(
    site: Path, monkeypatch: pytest.MonkeyPatch, device: Any, cards: list[float], states: list[str]
) -> None:
    give_cards(monkeypatch, *cards)
    set_privacy(site, device=device)
    checks = see("gpu", site, None)
    assert [check.state for check in checks] == states
    if "error" in states:
        assert f"device is {device}" in checks[0].message and checks[0].fix


def test_more_promised_than_the_card_has(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give_cards(monkeypatch, 15.0)  # what a card of nominal 16 GiB has
    promise(site, 1, 16)
    check = see("gpu", site, None)[-1]
    assert check.state == "error" and "promises 1 GPUs of 16 GiB" in check.message and "15.0 GiB" in check.message
    promise(site, 1, 15)
    assert see("gpu", site, None)[-1].state == "ok"


@pytest.mark.parametrize("asked", [{"num_of_gpus": 2}, {"num_of_gpus": 1, "mem_per_gpu_in_GiB": 15.5}])
def test_a_job_that_asks_for_more_than_was_promised(
    site: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, float]
) -> None:
    give_cards(monkeypatch, 24.0)
    promise(site, 1, 15)
    check = see("gpu", site, replace(DEMAND, resources=asked))[-1]
    assert check.state == "error" and "would never start" in check.message and "24.0 GiB" in check.message
    fits = replace(DEMAND, resources={"num_of_gpus": 1, "mem_per_gpu_in_GiB": 15})
    assert see("gpu", site, fits)[-1].state == "ok"


def test_a_batch_that_does_not_fit_on_the_card(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give_cards(monkeypatch, 4.0)
    checks = see("gpu", site, replace(DEMAND, training=5 * GIB))
    assert [check.state for check in checks] == ["ok", "error", "ok"] and "5.0 GiB" in checks[1].message


def test_too_little_memory(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # process, images and training: 2.1e8 bytes; no job says nothing about need
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2.0e8))
    monkeypatch.setattr(machine, "CGROUP", site)
    check = see("memory", site, DEMAND)[0]
    assert check.state == "error" and "190.7 MiB free, about 200.3 MiB needed" in check.message
    assert see("memory", site, None)[0].state == "ok"
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2.2e8))
    assert see("memory", site, DEMAND)[0].state == "ok"
    set_privacy(site, device="cpu,cpu")  # a process more
    assert f"about {machine.size_text(2.1e8 + DEMAND.process)} needed" in see("memory", site, DEMAND)[0].message


def test_the_limit_of_a_container_counts(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    (tmp_path / "memory.current").write_text("900000000\n")
    (tmp_path / "memory.max").write_text("1000000000\n")
    check = see("memory", site, DEMAND)[0]
    assert check.state == "error" and "95.4 MiB free" in check.message  # 1e8 bytes
    (tmp_path / "memory.max").write_text("max\n")
    assert see("memory", site, DEMAND)[0].state == "ok"


def disk_of(monkeypatch: pytest.MonkeyPatch, free: float) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=int(free)))


@pytest.mark.parametrize(
    "case",  # workers in the scope, free shared memory, the job's demand, what is said
    [
        (4, 64 * 2**20, None, "warning"),  # a container's default
        (4, 2 * GIB, None, "ok"),
        (0, 64 * 2**20, None, "ok"),
        (4, 7e6, DEMAND, "warning"),  # 4 processes hold 2 batches of 1e6 bytes each
        (4, 9e6, DEMAND, "ok"),
        (None, 7e6, replace(DEMAND, workers=4), "warning"),
        (0, 7e6, replace(DEMAND, workers=4), "ok"),
    ],
)
def test_shared_memory_against_loader_processes(
    site: Path, monkeypatch: pytest.MonkeyPatch, case: tuple[int | None, float, Demand | None, str]
) -> None:
    workers, free, demand, state = case
    set_privacy(site, **({} if workers is None else {"workers": workers}))
    disk_of(monkeypatch, free)
    check = see("memory", site, demand)[-1]
    assert check.subject == "shared memory" and check.state == state
    if state == "warning":
        assert "--shm-size" in check.fix and '"workers": 0' in check.fix
