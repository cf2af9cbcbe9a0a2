"""Random stories of three jobs in two projects on six GPUs, played with every arrangement that can decide who runs
when.

    export KUBECONFIG=…        # kubelab with two nodes; for `gangs`, started with --feature GenericWorkload
    python -m benchmarks.stories --arrangement sharing [--arrangement kueue …] [--stories 20] [--train] [--json FILE]

`story` generates the events, `settle` evaluates the state in which jobs come to rest, and `arrangements` defines who
decides. docs/sharing.md has results.
"""
