"""Who gets how many workers when jobs share a cluster: pure, so that it can be simulated and tested by itself.

`model` has the words, `decide` the one function that answers, `resizing` the rule when a group takes newcomers in.
Nothing here reads a clock, an environment or a network; `now` is a parameter.
"""
