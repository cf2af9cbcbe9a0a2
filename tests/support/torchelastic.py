"""A job as TorchElastic's two samples have it: their fields, with other names."""

from __future__ import annotations

import textwrap

NAMESPACE, NAME = "elastic-job", "imagenet"
_MANIFEST = """\
apiVersion: elastic.pytorch.org/v1alpha1
kind: ElasticJob
metadata:
  name: {name}
  namespace: {namespace}
spec:
  rdzvEndpoint: "{endpoint}"
  minReplicas: 1
  maxReplicas: {most}
  replicaSpecs:
    Worker:
      replicas: 2
      restartPolicy: ExitCode
      template:
        apiVersion: v1
        kind: Pod
        spec:
"""


def torchelastic_job(pod: str, endpoint: str = "etcd-service:2379", most: int = 2) -> str:
    """The manifest; `pod` is the YAML of the spec of its pods, `endpoint` where their etcd is."""
    head = _MANIFEST.format(name=NAME, namespace=NAMESPACE, endpoint=endpoint, most=most)
    return head + textwrap.indent(textwrap.dedent(pod), " " * 10)
