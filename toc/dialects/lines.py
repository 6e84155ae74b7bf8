"""Where calls of dialects wait for servers: on threads of their own. So they hold up no call of another door,
and none holds up them.

Thousands may wait: the protocols of dialects have no answer that means "try later".
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ParamSpec, TypeVar

from toc.gateway.service import Service

MAX_IN_LINE = 5_000
"""Most calls that wait for a thread of one server."""

P = ParamSpec("P")
R = TypeVar("R")


class Lines:
    """The threads of all dialects of a process. Raises Busy."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def at_server(self, server: int, do: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run what asks one database server, by number. Raises StoreUnavailable if it is known to be away."""
        self._service.check_there(server)
        return await self._service.within(f"line-{server}", partial(do, *args, **kwargs), most=MAX_IN_LINE)

    async def at_all(self, do: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run what asks all database servers."""
        return await self._service.within("line-all", partial(do, *args, **kwargs))

    async def at_length(self, do: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run what takes many steps."""
        return await self._service.within("line-long", partial(do, *args, **kwargs))
