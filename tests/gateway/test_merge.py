"""Several streams as one: each in order, none ahead of its reader, all closed with the first failure."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from gateway.merge import Source, merged


class Counting:
    """Counts to `end`; then ends, or fails."""

    def __init__(self, end: int, fails: bool = False) -> None:
        self.given = 0
        self.closed = 0
        self._end = end
        self._fails = fails

    def __aiter__(self) -> Counting:
        return self

    async def __anext__(self) -> int:
        await asyncio.sleep(0)
        if self.given == self._end:
            raise OSError("broken") if self._fails else StopAsyncIteration
        self.given += 1
        return self.given

    async def aclose(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("lengths", [[3], [0, 4, 2], [1] * 50])
async def test_each_in_order(lengths: list[int]) -> None:
    sources = [Counting(length) for length in lengths]
    seen: list[list[int]] = [[] for _ in lengths]
    async with aclosing(merged(sources)) as items:
        async for index, item in items:
            seen[index].append(item)
            assert sources[index].given == item  # no further than what was read
    assert seen == [list(range(1, length + 1)) for length in lengths]
    assert all(source.closed for source in sources)


@pytest.mark.parametrize("others", [0, 3])
async def test_the_first_failure_ends_it(others: int) -> None:
    sources: list[Counting] = [Counting(2, fails=True), *(Counting(1000) for _ in range(others))]
    merging: Source[tuple[int, int]] = merged(sources)

    async def read() -> None:
        async with aclosing(merging) as items:
            async for _ in items:
                pass

    with pytest.raises(OSError, match="broken"):
        await read()
    assert all(source.closed for source in sources)
    assert all(source.given < 1000 for source in sources)
