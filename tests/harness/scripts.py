"""The Lua scripts of the index as they are loaded, for tests that change what they say."""

import hashlib

import pytest

from toc.index import queues
from toc.index.calls import Script

SCRIPTS: dict[str, Script] = {one.name: one for one in vars(queues).values() if isinstance(one, Script)}


def rewrite(script: Script, source: str, patch: pytest.MonkeyPatch | None = None) -> None:
    """The script says this from now on, or until ``patch`` is undone."""
    said = {"source": source, "sha": hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()}
    for name, value in said.items():
        if patch is None:
            setattr(script, name, value)
        else:
            patch.setattr(script, name, value)
