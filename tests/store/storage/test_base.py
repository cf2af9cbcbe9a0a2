"""Bucket URLs: parsed, formatted, and refused without showing a secret."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticctl_store import storage as storages
from elasticctl_store.errors import StorageError
from elasticctl_store.storage import base


@pytest.mark.parametrize(
    ("url", "bucket", "prefix", "options"),
    [
        ("s3://bkt", "bkt", "", {}),
        ("s3://bkt/", "bkt", "", {}),
        ("s3://my.bkt-1/a/b c/", "my.bkt-1", "a/b c/", {}),
        ("s3://bkt/a?region=eu-west-1", "bkt", "a/", {"region": "eu-west-1"}),
        ("s3://bkt/a?endpoint=http://minio:9000", "bkt", "a/", {"endpoint": "http://minio:9000"}),
        ("s3://bkt?region=auto&endpoint=https%3A%2F%2Fr2", "bkt", "", {"region": "auto", "endpoint": "https://r2"}),
    ],
)
def test_urls_are_parsed_and_formatted(url: str, bucket: str, prefix: str, options: dict[str, str]) -> None:
    place = base.parse(url, ("endpoint", "region"))
    assert (place.bucket, place.prefix, dict(place.options)) == (bucket, prefix, options)
    assert base.parse(place.url, ("endpoint", "region")) == place


names = st.text(st.characters(exclude_categories=["C", "Z"], exclude_characters="/?"), min_size=1, max_size=6)


@settings(max_examples=30)
@given(
    st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{1,20}", fullmatch=True),
    st.lists(names.filter(lambda name: name not in (".", "..")), max_size=3),
    st.dictionaries(st.just("region"), st.text(min_size=1, max_size=8)),
)
def test_the_shown_url_of_a_location_names_it(bucket: str, path: list[str], options: dict[str, str]) -> None:
    place = base.Location("s3", bucket, "".join(f"{name}/" for name in path), options)
    assert base.parse(place.url, ("endpoint", "region")) == place


def test_names_are_encoded_for_a_request() -> None:
    assert base.parse("s3://bkt/a b/é", ()).path_of("x+y?&=%~.z") == "a%20b/%C3%A9/x%2By%3F%26%3D%25~.z"


@pytest.mark.parametrize(
    ("rest", "why"),
    [
        ("", "not a valid bucket name"),
        ("/a", "not a valid bucket name"),
        ("b ucket/a", "not a valid bucket name"),
        ("key:hunter2@bkt/a", "set credentials in the environment"),
        ("key:/hunter2@bkt/a", "set credentials in the environment"),
        ("bkt/a//b", "not a prefix"),
        ("bkt/a/../b", "not a prefix"),
        ("bkt/a\nb", "not a prefix"),
        ("bkt/a?aws_secret_access_key=hunter2", "'aws_secret_access_key' is not an option"),
        ("bkt/a?endpoint=http://key:hunter2@minio", "without credentials"),
        ("bkt/a?endpoint=minio:9000", "must be an http or https URL"),
        ("bkt/a?endpoint=http://minio:port", "must be an http or https URL"),
        ("bkt/a?endpoint=", "must be an http or https URL"),
    ],
)
def test_an_invalid_url_is_refused_without_showing_secrets(rest: str, why: str) -> None:
    for scheme in ("s3", "gs"):
        with pytest.raises(StorageError, match=why) as refused:
            storages.open(f"{scheme}://{rest}")
        assert "hunter2" not in str(refused.value)
