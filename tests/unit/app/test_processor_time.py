"""What three clocks say of a piece of work, with clocks that are set by hand."""

from collections.abc import Callable

import pytest

from harmofl.app.processor_time import Clocks, Spent, busy_line, spent


class Hands:
    """Three clocks that move only where a test moves them."""

    def __init__(self) -> None:
        self.wall = self.process = self.thread = 100.0

    def moved(self, wall: float, process: float, thread: float) -> Callable[[], str]:
        def work() -> str:
            self.wall, self.process, self.thread = self.wall + wall, self.process + process, self.thread + thread
            return "done"

        return work

    @property
    def clocks(self) -> Clocks:
        return Clocks(lambda: self.wall, lambda: self.process, lambda: self.thread)


def test_one_thread_on_half_a_core() -> None:
    # 3 s of the processor in 6 s on the wall: alone on the machine it would have been 3 s
    hands = Hands()
    result, taken = spent(hands.moved(wall=6, process=3, thread=3), hands.clocks)
    assert result == "done"
    assert (taken.idle, taken.threads, taken.share) == (3, 1, 0.5)


def test_four_threads_of_which_three_work() -> None:
    # the thread that asks works 2 s, all together 6 s: 3 at work, so that 6 s of the processor pass in 2 on the wall
    hands = Hands()
    _, taken = spent(hands.moved(wall=2.5, process=6, thread=2), hands.clocks)
    assert (taken.idle, taken.threads, taken.share) == (2, 3, 0.8)


def test_load_changes_the_share_and_not_the_idle_time() -> None:
    quiet, loaded = Spent(wall=2, process=3, thread=2), Spent(wall=9, process=3, thread=2)
    assert quiet.idle == loaded.idle == 2
    assert (quiet.share, loaded.share) == (1, pytest.approx(2 / 9))


def test_pieces_of_work_add_up() -> None:
    # 1 s of 1 and 1 s of 4: 2 of 5; clocks of different grain never make the share more than a whole core
    assert (Spent(1, 1, 1) + Spent(4, 1, 1)).share == 0.4
    assert Spent(wall=0.99, process=1, thread=1).share == 1
    assert (Spent(0, 0, 0).idle, Spent(0, 0, 0).share) == (0, 1)


def test_a_busy_machine_is_named_and_an_idle_one_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.getloadavg", lambda: (3.25, 0, 0))
    monkeypatch.setattr("psutil.cpu_count", lambda: 2)
    assert busy_line(0.95, "a round takes 9 s") is None
    assert busy_line(0.5, "a round takes 9 s") == (
        "this machine is busy: its load is 3.2 on 2 cores, and a thread got 50% of a core. The times above are those "
        "of the idle machine. While it stays busy, a round takes 9 s."
    )
