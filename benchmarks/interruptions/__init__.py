"""An hour of spot machines: notices and silent losses at random, and the proof of what they cost.

    export KUBECONFIG=… ELASTICCTL_TEST_LAB=…        # kubelab with two nodes and Karpenter
    python -m benchmarks.interruptions [--for-s 3600] [--calm-s 240] [--seed S] [--json FILE] [--keep DIR]

A job of three workers trains on spot machines that Karpenter brings. It is left alone at first, for comparison. Then
workers get notice in every way that a cloud or an administrator gives it, and are lost in every way without, one event
after the other, each once the group is whole again. In the end the script's record and the journal must show that no
step was done again where there was notice, that every sample was used exactly once, that the group got whole after
each event, and that the final weights are those of an undisturbed run. Otherwise the exit code is 1.
"""
