"""Random stories of three jobs in two projects on six GPUs, told to every arrangement that can decide who runs when.

    export KUBECONFIG=…        # kubelab with two nodes; for `gangs`, started with --feature GenericWorkload
    python -m benchmarks.stories --arrangement sharing [--arrangement kueue …] [--stories 20] [--train] [--json FILE]

`story` tells what happens, `rest` judges how jobs have come to rest, `arrangements` has who decides. docs/sharing.md
has results.
"""
