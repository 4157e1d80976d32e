"""What threads post to the event loop: everything, once and in order."""

from __future__ import annotations

import asyncio
import threading

from worker.mailbox import Mailbox

POSTS = 20_000  # more than a pipe holds bytes for while nobody reads


async def test_calls_are_made_in_the_order_of_each_thread() -> None:
    box = Mailbox(asyncio.get_running_loop())
    got: list[tuple[int, int]] = []
    done = asyncio.Event()

    def post_all(thread: int) -> None:
        for number in range(POSTS):
            box.post(got.append, (thread, number))

    threads = [threading.Thread(target=post_all, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        await asyncio.to_thread(thread.join)
    box.post(done.set)
    await asyncio.wait_for(done.wait(), 30)
    for i in range(3):
        assert [number for thread, number in got if thread == i] == list(range(POSTS))
    box.close()


async def test_more_than_the_pipe_holds_is_delivered_once_the_loop_is_free() -> None:
    box = Mailbox(asyncio.get_running_loop())
    got: list[int] = []
    for number in range(100_000):
        box.post(got.append, number)
    done = asyncio.Event()
    box.post(done.set)
    await asyncio.wait_for(done.wait(), 30)
    assert got == list(range(100_000))
    box.close()


async def test_a_call_that_fails_is_told_and_does_not_hold_up_the_next() -> None:
    loop = asyncio.get_running_loop()
    told: list[BaseException] = []
    loop.set_exception_handler(lambda _, context: told.append(context["exception"]))
    box = Mailbox(loop)

    def fail() -> None:
        raise ValueError

    done = asyncio.Event()
    box.post(fail)
    box.post(done.set)
    await asyncio.wait_for(done.wait(), 10)
    assert [type(error) for error in told] == [ValueError]
    box.close()
