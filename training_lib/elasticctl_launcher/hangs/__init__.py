"""Detects hangs from outside the ranks, in any script, and reports where the ranks stand.

`vitals` and `stacks` inspect processes, `places` names the place where a rank stands, `standstill` decides whether it
moves, `pace` how long it may stand still, and `watch_ranks` does all this while a generation runs. `show_stacks` serves
`elasticctl stacks`.
"""
