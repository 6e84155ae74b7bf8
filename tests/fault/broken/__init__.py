"""Builds of toc that are wrong on purpose, and which test sees each law broken.

Each module patches what its name says when it is imported: as the app of a daemon, as a program that
submits (``python -m``), or in the test itself. The product has no hooks for any of it. The checker must see
it, else its praise means nothing.

A guard is left out at three heights: of a whole system, by the *builds* here (test_broken_builds.py); in the
process of the *state machine* (tests/property/broken.py); and in the *model* (the mutations of
spec/searches.toml). A fault is a mutation of the world instead: the test of its number proves that it bit.

| law | what breaks it | seen by |
| --- | --- | --- |
| L no loss | acknowledged_first, indexed_first | builds |
| L | a COMMIT that is not sent again | fault 2 |
| L, T it settles | ``swept`` | state machine, model |
| E never early | row_check_skipped | builds |
| E | ``row-check: next_time`` | state machine, model |
| C cancel holds | row_check_skipped, a cancel that looks at the row alone | builds |
| C | ``row-check: status``, ``mark-tried`` | state machine, model |
| D duplicates | held_ids_forgotten, fence_dropped | builds |
| D | ``held-once``, ``last-look``, ``whole-score``, ``queue-fence`` | state machine, model |
| D | ``prepared-stays`` | state machine |
| D | leases that are not taken, renewed, looked at or given up | model |
| X dead is dead | ``dead-restored``, ``success-fence`` | state machine, model |
| R retries | failure_guard_dropped | builds |
| R | ``failure-fence``, ``never-the-last`` | state machine, model |
| T it settles | what a dead gateway has taken stays taken; rows that wait long get no lease | model |
| I isolation | what hangs, is locked, floods, or is another caller's | faults 18, 29, 34, 35, 48, 49, 53 |
| I | thread_dies, loop_ends | faults 25, 34 |
| one end of each version | answers that look at no nonce, version, status or time | model, fault 45 |
| what is no value is refused | each door's check of it | harness/refused.py, and what is made up there |
| scripts do what they say | another key, argument or batch | unit/test_index_lua, test_transitions |
| stored formats stay | another column, key, score, node | contract/test_layout, migration |
"""
