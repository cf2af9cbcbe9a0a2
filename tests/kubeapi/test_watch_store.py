"""What a watch has shown: diffs, late events, and what we wrote ourselves."""

from __future__ import annotations

import itertools
import tracemalloc
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from elasticctl.kubeapi.watch import ObjectStore


def item(name: str, version: int, uid: str = "", **fields: Any) -> dict[str, Any]:
    metadata = {"namespace": "ns", "name": name, "uid": uid or name, "resourceVersion": str(version)}
    return {"metadata": metadata, **fields}


class Heard:
    """A store and what its subscribers received, as "+name", "~name", "-name"."""

    def __init__(self) -> None:
        self.store = ObjectStore(index_of=lambda found: str(found.get("group", "")))
        self.news: list[str] = []
        self.store.subscribe(self._hear)

    def _hear(self, old: Any, new: Any) -> None:
        sign = "+" if old is None else "-" if new is None else "~"
        self.news.append(sign + (new or old)["metadata"]["name"])

    def take(self) -> list[str]:
        news, self.news = self.news, []
        return news


def test_objects_of_no_interest_are_not_stored() -> None:
    store = ObjectStore(keep=lambda found: bool(found.get("wanted")))
    store.replace(store.prune_page([item("a", 1), item("b", 2, wanted=1)]), "10")
    assert [found["metadata"]["name"] for found in store.items()] == ["b"]
    store.apply("ADDED", item("c", 11))
    store.apply("ADDED", item("d", 12, wanted=1))
    store.apply("MODIFIED", item("b", 13))
    assert [found["metadata"]["name"] for found in store.items()] == ["d"]


def test_an_object_that_changes_its_group_leaves_nothing_in_the_others() -> None:
    def used() -> int:
        for _ in range(500):
            store.apply("MODIFIED", item("a", next(version), group=f"group-{next(version)}"))
        return tracemalloc.get_traced_memory()[0]

    store, version = ObjectStore(index_of=lambda found: str(found.get("group", ""))), itertools.count(1)
    tracemalloc.start()
    try:
        assert used() - used() > -20_000
    finally:
        tracemalloc.stop()


def test_a_relist_reports_only_changes() -> None:
    heard = Heard()
    heard.store.replace([item("a", 1), item("b", 2), item("c", 3)], "10")
    assert heard.take() == ["+a", "+b", "+c"]
    heard.store.replace([item("a", 1), item("b", 12, x=1), item("d", 13)], "20")
    assert heard.take() == ["-c", "~b", "+d"]


def test_an_event_that_changes_nothing_we_read_is_no_news() -> None:
    heard = Heard()
    heard.store.replace([item("a", 1)], "1")
    heard.take()
    heard.store.apply("MODIFIED", item("a", 2))
    assert heard.take() == []
    assert heard.store.get("ns/a") == item("a", 2)


def test_objects_are_found_by_their_group_as_it_is_now() -> None:
    heard = Heard()
    heard.store.replace([item("b", 1, group="x"), item("a", 2, group="x")], "2")
    assert [found["metadata"]["name"] for found in heard.store.group("x")] == ["a", "b"]
    heard.store.apply("MODIFIED", item("a", 3, group="y"))
    heard.store.apply("DELETED", item("b", 4, group="x"))
    assert (heard.store.group("x"), len(heard.store.group("y"))) == ([], 1)


def test_our_own_writes_are_kept_until_the_watch_catches_up() -> None:
    heard = Heard()
    heard.store.replace([], "10")
    heard.store.record_write(item("a", 15))
    assert heard.take() == ["+a"]
    heard.store.replace([], "12")  # a list from before our write
    assert heard.take() == []
    heard.store.apply("ADDED", item("a", 15))
    heard.store.apply("DELETED", item("a", 17))
    assert heard.take() == ["-a"]
    heard.store.record_write(item("a", 15))  # our answer comes late: the watch knows better
    assert (heard.take(), heard.store.items()) == ([], [])


def test_a_bookmark_moves_the_watch_on() -> None:
    heard = Heard()
    heard.store.replace([], "10")
    heard.store.apply("BOOKMARK", {"metadata": {"resourceVersion": "30"}})
    heard.store.record_write(item("a", 20))
    assert heard.store.items() == []


def test_the_end_of_a_predecessor_does_not_remove_its_successor() -> None:
    heard = Heard()
    heard.store.replace([item("a", 5)], "10")
    heard.store.record_deletion("ns/a", "another uid")
    assert heard.take() == ["+a"]
    heard.store.record_deletion("ns/a", "a")
    heard.store.record_write(item("a", 22, uid="b"))
    heard.store.apply("DELETED", item("a", 20))
    assert heard.take() == ["-a", "+a"]
    assert heard.store.get("ns/a") == item("a", 22, uid="b")


def test_late_events_do_not_bring_back_a_deleted_pod() -> None:
    heard = Heard()
    heard.store.replace([item("a", 5)], "10")
    heard.store.record_deletion("ns/a", "a")
    heard.store.apply("MODIFIED", item("a", 11, phase="Failed"))  # the kubelet's last word, on its way since before
    heard.store.replace([item("a", 11)], "11")  # and so a list that was asked for before
    assert (heard.take(), heard.store.items()) == (["+a", "-a"], [])
    heard.store.apply("DELETED", item("a", 12))
    heard.store.apply("ADDED", item("a", 13, uid="b"))
    assert heard.take() == ["+a"]
    assert heard.store._ended == set()


def test_the_end_of_a_pod_that_no_list_has_any_more_is_not_waited_for() -> None:
    heard = Heard()
    heard.store.replace([item("a", 5), item("b", 6)], "10")
    heard.store.record_deletion("ns/a", "a")
    heard.store.record_deletion("ns/b", "b")
    heard.store.replace([item("b", 11)], "20")
    assert (heard.store._ended, heard.store.items()) == ({"b"}, [])
    heard.store.replace([item("b", 4)], "9")  # restored from a backup
    assert heard.store.items() == [item("b", 4)]


def test_a_cluster_restored_from_a_backup_is_taken_as_it_is() -> None:
    heard = Heard()
    heard.store.replace([item("a", 90), item("b", 91)], "100")
    heard.take()
    heard.store.replace([item("a", 40, x=1)], "50")
    assert heard.store.items() == [item("a", 40, x=1)]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=12), st.data())
@settings(max_examples=50)
def test_in_whatever_order_answers_and_events_come_the_end_is_the_truth(writes: Any, data: Any) -> None:
    """`writes` are puts and deletions in the server's order; each answer to a put comes at any time after it."""
    store, truth, events, answers = ObjectStore(), {}, [], []
    store.replace([], "1")
    for version, (name, keep) in enumerate(writes, 2):
        if keep:
            truth[name] = item(name, version)
            events.append(("MODIFIED", truth[name]))
            answers.append(truth[name])
        elif name in truth:
            del truth[name]
            events.append(("DELETED", item(name, version)))
    while events or answers:
        if answers and (not events or data.draw(st.booleans())):
            store.record_write(answers.pop(0))
        else:
            store.apply(*events.pop(0))
    assert {found["metadata"]["name"]: found for found in store.items()} == truth
