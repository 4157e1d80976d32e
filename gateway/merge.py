"""Several event streams as one, each item with the index of the stream it came from."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Source(Protocol[T_co]):
    """An iterator that holds something until it is closed, ended or not."""

    def __aiter__(self) -> AsyncIterator[T_co]: ...

    async def __anext__(self) -> T_co: ...

    async def aclose(self) -> None: ...


def merged(sources: Sequence[Source[T]]) -> Source[tuple[int, T]]:
    """Ends when all sources have ended; the first failure ends it too. At most one item a source is held."""
    return _Only(sources[0]) if len(sources) == 1 else _interleaved(sources)


class _Only(Generic[T]):
    def __init__(self, source: Source[T]) -> None:
        self._source = source
        self.aclose = source.aclose

    def __aiter__(self) -> _Only[T]:
        return self

    async def __anext__(self) -> tuple[int, T]:
        return 0, await self._source.__anext__()


async def _interleaved(sources: Sequence[Source[T]]) -> AsyncGenerator[tuple[int, T], None]:
    waiting = {_next(source): index for index, source in enumerate(sources)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                index = waiting.pop(task)
                try:
                    item = task.result()
                except StopAsyncIteration:
                    continue
                yield index, item
                waiting[_next(sources[index])] = index
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for source in sources:
            await source.aclose()


def _next(source: Source[T]) -> asyncio.Future[T]:
    return asyncio.ensure_future(source.__anext__())
