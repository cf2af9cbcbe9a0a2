"""Detects hangs from outside the ranks, in any script, and reports where the ranks stand.

`process_activity` and `stacks` inspect processes, `rank_location` names the place where a rank stands, `standstill`
decides whether it moves and how long it may stand still, and `watch_ranks` does all this while a generation runs.
"""
