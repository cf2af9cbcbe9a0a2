"""How soon another controller takes over, and what does not take the lease from a leader.

    export KUBECONFIG=…        # kubelab with two nodes
    python -m benchmarks.leaders [--kills 20] [--freeze-s 3 …] [--flood 64] [--json FILE]

Two replicas run beside the cluster with the rights and the priority that `install` gives them, and manage twenty jobs
of one worker. The leader is killed together with a worker, which the next leader creates again; the API server is
frozen; other clients flood it. docs/performance.md has results.
"""
