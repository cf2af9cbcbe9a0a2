"""What happens to a training job on Kubernetes: an ElasticJob beside Kubeflow's PyTorchJob, with the same script.

    export KUBECONFIG=…        # kubelab with three nodes, and its training-operator
    export ELASTICCTL_TEST_LAB=…/kubelab
    python -m benchmarks.peers [--contender NAME …] [--event NAME …] [--repeats 5] [--json FILE]
    python -m benchmarks.peers --merge FILE …      # the table of several runs

`contenders` are the jobs, `events` what happens to them. Steps are those that the script of benchmarks/recovery.py
records, reported in the same way. docs/performance.md has results.
"""
