"""``Migrator.upgrade`` as a program, which prints its progress.

python -m harness.upgrade URL DATABASES TABLES PREFIX
"""

import sys

from toc.store.migrate import Migrator


def main(url: str, databases: str, tables: str, prefix: str) -> None:
    """Upgrade all of it."""
    migrator = Migrator([url], databases=int(databases), tables=int(tables), prefix=prefix)
    migrator.upgrade(lambda *report: print(*report, flush=True))


if __name__ == "__main__":
    main(*sys.argv[1:5])
