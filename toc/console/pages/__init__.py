"""The pages, a module for each subject. A function with ``@page`` is one; ``menu`` puts it into the menu."""

from toc.console.pages import acts, numbers, overview, records, tasks
from toc.console.view import Page

SUBJECTS = (overview, tasks, numbers, acts, records)
PAGES = tuple(one for subject in SUBJECTS for one in vars(subject).values() if isinstance(one, Page))
"""All pages, in the order of the menu."""
