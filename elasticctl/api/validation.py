"""ElasticJob manifests as text: read, checked against the CRD's own schema, and written.

The rules are those of `elasticctl_controller/deploy/crd.yaml`, loaded as package data, plus what an API server does by
itself: object metadata, refusal of unknown fields, and the CEL rules, checked by hand.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import TYPE_CHECKING, Any

from elasticctl.api.codec import from_rfc3339
from elasticctl.api.errors import SpecError
from elasticctl.api.objects import at
from elasticctl.api.spec import API_VERSION, KIND, Manifest
from elasticctl.api.text import did_you_mean, join_or, quote
from elasticctl.api.yamltext import FieldPath, YamlDocument, format_path, parse_yaml

if TYPE_CHECKING:
    from jsonschema import ValidationError
    from jsonschema.protocols import Validator

__all__ = ["check_change", "crd", "load_manifest", "validate_manifest"]

_MISSING = "required, but missing"
_ENDPOINT = re.compile(r"((\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):[0-9]{1,5})?", re.ASCII)
_OPEN = "x-kubernetes-preserve-unknown-fields"
_TYPES = {
    "object": "a mapping",
    "array": "a list",
    "string": "text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
}


_RETIRED: Mapping[FieldPath, str] = {
    (
        "spec",
        "sharing",
        "podGroup",
    ): "Volcano and scheduler-plugins are no longer supported. FIX: leave this out, and use"
    " Kueue (`submit --queue`) or Kubernetes' own gangs (`install --feature gangs`)",
}
"""Fields that there were once, and what to use instead."""


def load_manifest(text: str | bytes, source: str = "") -> Manifest:
    """Read and check one manifest. Raises SpecError with the field and line of the first problem."""
    document = parse_yaml(text, source)
    validate_manifest(document)
    manifest: Manifest = document.data
    return manifest


def validate_manifest(document: YamlDocument) -> None:
    """Check a manifest; raises SpecError with the field and line of the first problem and the number of others."""
    if not isinstance(document.data, dict):
        what = "the file is empty" if document.data is None else f"must be a mapping, not {quote(document.data)}"
        raise SpecError(f"{what}. FIX: give an {KIND} manifest", line=document.line(()), source=document.source)
    # A misspelled field often makes a required one missing: report the misspelling first.
    problems = sorted(_problems(document.data), key=lambda found: (found[1] == _MISSING, document.line(found[0]) or 0))
    if not problems:
        return
    path, message = problems[0]
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    raise SpecError(
        message + more, path=format_path(path), line=document.line(path), source=document.source or "manifest"
    )


@functools.cache
def crd() -> Mapping[str, Any]:
    """The CustomResourceDefinition shipped with the controller."""
    text = resources.files("elasticctl_controller").joinpath("deploy", "crd.yaml").read_text("utf-8")
    found: Mapping[str, Any] = parse_yaml(text, "crd.yaml").data
    return found


def _problems(manifest: Mapping[str, Any]) -> Iterator[tuple[FieldPath, str]]:
    """Everything wrong with a manifest, as (path, message)."""
    for key, wanted in (("apiVersion", API_VERSION), ("kind", KIND)):
        if key in manifest and manifest[key] != wanted:
            yield (key,), f"must be {quote(wanted)}, not {quote(manifest[key])}"
    sound = True
    for error in _validator().iter_errors(manifest):
        sound = False
        yield from _explain(error)
    if sound:
        yield from _limits(manifest["spec"])


def check_change(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Check a change between two valid manifests. Raises SpecError with the field that must not change like this."""
    before, after = old["spec"], new["spec"]
    template = ("replicaSpecs", "Worker", "template")
    runs = before.get("suspend") is not True and after.get("suspend") is not True
    if runs and at(before, *template) != at(after, *template):
        raise SpecError(
            "the template of a job that runs cannot change, for its workers would no longer run the same. FIX: suspend"
            " the job (`elasticctl suspend JOB`), change it, and resume it; or submit a new one",
            path=format_path(("spec", *template)),
        )
    if before.get("cancel") is True and after.get("cancel") is not True:
        raise SpecError(
            "a job that was cancelled cannot be taken up again. FIX: `elasticctl rerun JOB`", path="spec.cancel"
        )


def _limits(spec: Mapping[str, Any]) -> Iterator[tuple[FieldPath, str]]:
    """The CEL rules of the CRD about one manifest, in Python."""
    endpoint = spec.get("rdzvEndpoint", "")
    if not _ENDPOINT.fullmatch(endpoint):
        yield ("spec", "rdzvEndpoint"), f"must be HOST:PORT, such as etcd:2379, not {quote(endpoint)}"
    goal = spec.get("goal")
    if goal is not None and "finishBy" not in goal and "budget" not in goal:
        yield ("spec", "goal"), "has neither a deadline nor a budget. FIX: give finishBy, budget or both"
    if goal is not None and endpoint:
        yield (
            ("spec", "rdzvEndpoint"),
            "a goal needs the controller's own rendezvous, which training reports its progress to. FIX: leave out"
            " rdzvEndpoint or goal",
        )
    if goal is not None and "finishBy" in goal and from_rfc3339(goal["finishBy"]) is None:
        said = quote(goal["finishBy"])
        yield ("spec", "goal", "finishBy"), f"must be a time such as 2026-11-27T17:00:00Z, not {said}"
    yield from _order_limits(spec.get("pools", {}).get("order", []))
    low, high = spec.get("minReplicas"), spec.get("maxReplicas")
    replicas = spec["replicaSpecs"]["Worker"].get("replicas", 1)
    where = ("spec", "replicaSpecs", "Worker", "replicas")
    if low is not None and high is not None and low > high:
        yield ("spec", "minReplicas"), f"{low} is more than maxReplicas, {high}"
    elif low is not None and replicas < low:
        yield where, f"{replicas} is less than minReplicas, {low}"
    elif high is not None and replicas > high:
        yield where, f"{replicas} is more than maxReplicas, {high}"


def _order_limits(order: list[Any]) -> Iterator[tuple[FieldPath, str]]:
    for index, pool in enumerate(order):
        if not pool:
            said = "describes no machines. FIX: give capacity, instanceType or zone"
            yield ("spec", "pools", "order", index), said
    if any(order.count(pool) > 1 for pool in order):
        yield ("spec", "pools", "order"), "names a pool twice. FIX: leave one of them out"


@functools.cache
def _validator() -> Validator:
    # jsonschema takes longer to import than the whole command line, and few verbs need it.
    from jsonschema import Draft202012Validator
    from jsonschema.validators import extend

    schema = _closed(crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"])
    schema["required"] = ["apiVersion", "kind", "metadata", "spec"]
    schema["properties"]["metadata"] = _metadata(schema["properties"]["metadata"])
    # JSON schema counts 2.0 among the integers; Kubernetes does not.
    types = Draft202012Validator.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int)
    checker: Validator = extend(Draft202012Validator, type_checker=types)(schema)  # type: ignore[no-untyped-call]
    return checker


def _closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A structural schema as plain JSON schema: unknown fields are refused unless it keeps them."""
    closed = {key: value for key, value in schema.items() if not key.startswith("x-")}
    if "pattern" in schema:
        # Python's $ lets a last newline pass.
        closed["pattern"] = schema["pattern"].removesuffix("$") + r"\Z"
    if "properties" in schema:
        closed["properties"] = {name: _closed(inner) for name, inner in schema["properties"].items()}
        if not schema.get(_OPEN):
            closed["additionalProperties"] = False
    if "items" in schema:
        closed["items"] = _closed(schema["items"])
    return closed


def _metadata(named: Mapping[str, Any]) -> dict[str, Any]:
    """Kubernetes' ObjectMeta, which a CRD must not spell out, with the CRD's rules for the name."""
    texts = {"type": "object", "additionalProperties": {"type": "string"}}
    label = {"type": "string", "maxLength": 63, "pattern": r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?\Z"}
    namespace = {
        "type": "string",
        "maxLength": 63,
        "pattern": r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?\Z",
        "description": "lower-case letters, digits and '-'",
    }
    # What a server adds is accepted, so that the output of one command is the input of another.
    added = ("uid", "resourceVersion", "creationTimestamp", "deletionTimestamp", "selfLink", "generateName")
    properties = {
        **{name: {"type": "string"} for name in added},
        "generation": {"type": "integer"},
        "deletionGracePeriodSeconds": {"type": "integer"},
        "ownerReferences": {"type": "array", "items": {"type": "object"}},
        "managedFields": {"type": "array", "items": {"type": "object"}},
        "finalizers": {"type": "array", "items": {"type": "string"}},
        "annotations": texts,
        "labels": {"type": "object", "additionalProperties": label},
        "namespace": namespace,
        **named["properties"],
    }
    return {"type": "object", "required": ["name"], "properties": properties, "additionalProperties": False}


def _explain(error: ValidationError) -> Iterator[tuple[FieldPath, str]]:
    """Turn a jsonschema error into (path, message) of each field that is wrong."""
    path: FieldPath = tuple(error.absolute_path)
    rule = str(error.validator)
    limit: Any = error.validator_value
    value: Any = error.instance
    schema = error.schema if isinstance(error.schema, Mapping) else {}
    if rule == "additionalProperties":
        known = schema.get("properties", {})
        for name in value:
            if name not in known:
                yield (*path, name), _RETIRED.get((*path, name), f"unknown field{did_you_mean(name, known)}")
    elif rule == "required":
        # jsonschema reports each missing name in an error of its own; the name is only in its message's quotes.
        name = next(name for name in limit if name not in value and error.message.startswith(repr(name)))
        yield (*path, name), _MISSING
    else:
        yield path, _expected(rule, limit, value, schema)


def _expected(rule: str, limit: Any, value: Any, schema: Mapping[str, Any]) -> str:
    """`must be …, not VALUE` for a rule about one value."""
    wanted = {
        "type": f"must be {_TYPES.get(str(limit), limit)}",
        "minimum": f"must be at least {limit}",
        "maximum": f"must be at most {limit}",
        "minLength": "must not be empty",
        "minItems": "must not be empty",
        "maxLength": f"must be at most {limit} characters long",
        "maxItems": f"must be at most {limit} items long",
        "pattern": f"must be {schema.get('description', f'of the form {limit}')}",
        "enum": f"must be {join_or(map(str, limit))}" if rule == "enum" else "",
    }.get(rule, f"breaks the rule {rule}: {limit}")
    near = did_you_mean(value, limit) if rule == "enum" and isinstance(value, str) else ""
    return f"{wanted}, not {quote(value)}{near}"
