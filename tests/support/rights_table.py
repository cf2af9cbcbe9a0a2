"""The table in docs/security.md of the controller's rights, from its manifests: `python -m tests.support.rights_table`.

What a rule is for stands with its role, as the annotation `why.elasticctl.dev/RESOURCE`. tests/test_rights_page.py
checks the page.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from elasticctl.api.codec import Manifest
from elasticctl.kubeapi import installation
from elasticctl.kubeapi.features import ALL, LABEL_FEATURE
from elasticctl.kubeapi.installation import OF_THE_CLUSTER
from tests.support.controller.rights import bound_roles, leader_role

PAGE = Path(__file__).parents[2] / "docs" / "security.md"
WHY = "why.elasticctl.dev/"
BEGIN, END = "<!-- table: rights -->\n", "<!-- end of table -->"
HEAD = "| feature | resource | verbs | why |\n|---|---|---|---|\n"


def roles() -> list[Manifest]:
    """The roles that the controller may have; the last is for its own namespace."""
    found = installation.manifests(features=ALL)
    return [*bound_roles(found), leader_role(found)]


def rows(role: Manifest) -> Iterator[tuple[str, str, str, str]]:
    """The feature, the resource, the verbs and the reason of each rule."""
    metadata = role["metadata"]
    feature = metadata["labels"].get(LABEL_FEATURE) or ("own namespace" if role["kind"] == "Role" else "always")
    for rule in role["rules"]:
        names = "".join(f", `{name}` alone" for name in rule.get("resourceNames", ()))
        for resource in rule["resources"]:
            cluster = " (the cluster's)" if resource in OF_THE_CLUSTER else ""
            groups = " and ".join(f"`{resource}{'.' if group else ''}{group}`" for group in rule["apiGroups"])
            why = metadata["annotations"][f"{WHY}{resource.replace('/', '.')}"]
            yield feature, f"{groups}{names}{cluster}", ", ".join(rule["verbs"]), why


def generate(page: str) -> str:
    """The page with the table between its marker lines."""
    table = "".join(f"| {' | '.join(row)} |\n" for role in roles() for row in rows(role))
    made, count = re.subn(f"{BEGIN}.*?{END}", lambda _: f"{BEGIN}\n{HEAD}{table}\n{END}", page, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"{PAGE.name} needs one pair of marker lines; it has {count}")
    return made


if __name__ == "__main__":
    PAGE.write_text(generate(PAGE.read_text("utf-8")), "utf-8")
