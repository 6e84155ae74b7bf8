"""The task table: the only importer of sqlalchemy, pymysql, alembic and cryptography.

``toc.store.migrate`` is imported separately: programs that do not migrate need no alembic in memory.
"""
