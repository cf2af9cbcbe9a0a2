"""How soon another controller takes over, and what does not take the lease from one that leads.

    export KUBECONFIG=…        # kubelab with two nodes
    python -m benchmarks.leaders [--kills 20] [--freeze-s 3 …] [--flood 64] [--json FILE]

Two replicas run beside the cluster with the rights and the priority that `install` gives them, and keep twenty jobs of
one worker. The leader is killed together with a worker, and whoever takes over makes that worker again; the API server
is frozen; other clients flood it. docs/performance.md has results.
"""
