"""What pages load: scripts, the style, the icon. Each has its checksum in its path, so a browser keeps it for
good; compressed once, when the process starts."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path
from typing import NamedTuple

from toc.gateway.calls import Answer

STATIC = Path(__file__).parent / "static"
TYPES = {
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}


class _Asset(NamedTuple):
    media_type: str
    plain: bytes
    packed: bytes


class Assets:
    """The files of STATIC, below the path ``below``."""

    def __init__(self, below: str) -> None:
        self._paths: dict[str, str] = {}
        self._assets: dict[str, _Asset] = {}
        for file in sorted(STATIC.iterdir()):
            if file.suffix in TYPES:
                data = file.read_bytes()
                path = f"{below}/{hashlib.sha256(data).hexdigest()[:16]}/{file.name}"
                self._paths[file.name] = path
                packed = gzip.compress(data, 9, mtime=0)
                self._assets[path] = _Asset(TYPES[file.suffix], data, packed)

    def path(self, name: str) -> str:
        """Return where a file is. Raises KeyError."""
        return self._paths[name]

    def find(self, path: str, encodings: str | None) -> Answer | None:
        """Return the answer to a request for a path; ``encodings`` is its Accept-Encoding."""
        asset = self._assets.get(path)
        if asset is None:
            return None
        headers = {
            "cache-control": "public, max-age=31536000, immutable",
            "vary": "accept-encoding",
            "content-security-policy": "default-src 'none'; sandbox",
            "cross-origin-resource-policy": "same-origin",
        }
        if not packs(encodings):
            return Answer(asset.plain, media_type=asset.media_type, headers=headers)
        return Answer(
            asset.packed, media_type=asset.media_type, headers={**headers, "content-encoding": "gzip"}
        )


def packs(encodings: str | None) -> bool:
    """Whether who sends this Accept-Encoding understands gzip."""
    return any(one.strip().partition(";")[0] == "gzip" for one in (encodings or "").lower().split(","))
