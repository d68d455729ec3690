from __future__ import annotations

import threading

from server.runtime.queues import CommandQueue


def test_take_returns_all_items_in_order() -> None:
    box: CommandQueue[int] = CommandQueue(4)
    for item in (1, 2, 3):
        assert box.post(item)
    assert box.take(0) == [1, 2, 3]
    assert box.take(0) == []


def test_full_queue_refuses_all_but_urgent_items() -> None:
    box: CommandQueue[str] = CommandQueue(1)
    assert box.post("first")
    assert not box.post("second")
    assert box.post("cancel", urgent=True)
    assert box.take(None) == ["first", "cancel"]


def test_closed_queue_returns_remaining_items_and_then_none() -> None:
    box: CommandQueue[int] = CommandQueue(4)
    box.post(1)
    box.close()
    assert not box.post(2, urgent=True)
    assert box.take(None) == [1]
    assert box.take(None) is None


def test_post_wakes_a_sleeping_taker() -> None:
    box: CommandQueue[int] = CommandQueue(4)
    taken: list[list[int] | None] = []
    taker = threading.Thread(target=lambda: taken.append(box.take(None)))
    taker.start()
    box.post(7)
    taker.join(60)
    assert taken == [[7]]


def test_take_returns_after_its_timeout() -> None:
    box: CommandQueue[int] = CommandQueue(4)
    assert box.take(0.001) == []
