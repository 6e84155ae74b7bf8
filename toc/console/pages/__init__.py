"""The pages, a module for each subject. A function with ``@page`` is one; ``menu`` puts it into the menu."""

from __future__ import annotations

from toc.console.pages import acts, cluster, dead, numbers, overview, records, tasks, topics
from toc.console.view import Page

SUBJECTS = (overview, topics, tasks, dead, numbers, acts, cluster, records)
PAGES = tuple(one for subject in SUBJECTS for one in vars(subject).values() if isinstance(one, Page))
"""All pages, in the order of the menu."""
