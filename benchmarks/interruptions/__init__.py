"""An hour on spot machines: notices and silent losses at random, and the proof of what they cost.

    export KUBECONFIG=… ELASTICCTL_TEST_LAB=…        # kubelab with two nodes and Karpenter
    python -m benchmarks.interruptions [--for-s 3600] [--calm-s 240] [--cloud gcp] [--seed S] [--keep DIR]

A job of three workers trains on spot machines that Karpenter launches. It is first left alone, for comparison. Then
workers get notice in every way that a cloud or an administrator gives it, and are lost in every way without notice, one
event after the other, each once the group is complete again. In the end, the script's records and the journal must show
that no step was repeated if there was notice, that every sample was used exactly once, that the group was complete
again after each event, and that the final weights are those of an undisturbed run. Otherwise the exit code is 1.
"""
