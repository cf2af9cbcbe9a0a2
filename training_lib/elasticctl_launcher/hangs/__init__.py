"""Hangs: found from outside the ranks, named, and told to the agent, in scripts that have nothing of ours in them too.

`vitals` and `stacks` look at processes, `places` says where a rank stands, `standstill` decides whether it moves,
`pace` how long it may stand still, `watch_ranks` does all of that while a generation runs, and `show_stacks` shows the
stacks to whoever asks.
"""
