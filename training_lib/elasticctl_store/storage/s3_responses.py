"""The responses of S3: its XML, its error codes, and what to do about them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from xml.etree import ElementTree

from elasticctl_store.errors import FullError, MissingError, StorageError
from elasticctl_store.storage.base import Location
from elasticctl_store.storage.cloud import Action
from elasticctl_store.storage.http import HttpResponse, Verdict, is_temporary

NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"


WRITE = Action("write", "to", "s3:PutObject")
READ = Action("read", "from", "s3:GetObject, and s3:ListBucket to find out what is not there")
LIST = Action("list", "in", "s3:ListBucket")
DELETE = Action("delete", "from", "s3:DeleteObject")
ABORT = Action("abort the upload of", "to", "s3:AbortMultipartUpload")
UPLOADS = Action("list the uploads of", "to", "s3:ListBucketMultipartUploads")

_STALE = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken", "RequestExpired"}
_TEMPORARY = {
    "BadDigest",  # damaged in transit
    "ConditionalRequestConflict",
    "InternalError",
    "OperationAborted",
    "RequestTimeout",
    "ServiceUnavailable",
    "SlowDown",
    "XAmzContentChecksumMismatch",
}
_ELSEWHERE = {
    "PermanentRedirect",
    "TemporaryRedirect",
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
}
_REFUSED = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidSecurity"}
_FULL = {
    "InsufficientCapacity",
    "InsufficientStorage",
    "QuotaExceeded",
    "XMinioAdminBucketQuotaExceeded",
    "XMinioStorageFull",
}
"""What Snowball, versitygw, Ceph and MinIO say, which have disks and quotas of a certain size."""


def parse(body: bytes) -> ElementTree.Element:
    """Return the XML of a response without its namespaces. Raises StorageError if it is not XML."""
    try:
        root = ElementTree.fromstring(body.strip())  # noqa: S314 - from the service the state is entrusted to; expat bounds entities
    except ElementTree.ParseError as e:
        raise StorageError(f"the endpoint answers with something that is not S3's XML ({e}). FIX: check its URL") from e
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
    return root


def parse_listing(body: bytes) -> ElementTree.Element:
    """Return a page of a listing. Raises StorageError if it is not one, or if its number of keys is not the one it
    states."""
    found = parse(body)
    if found.tag not in ("ListBucketResult", "ListMultipartUploadsResult"):
        raise StorageError(
            f"the endpoint answers with {found.tag!r:.60}, which is not a listing of S3. FIX: check its URL"
        )
    count = found.findtext("KeyCount")
    if count is not None and count != str(len(names(found))):
        raise StorageError(f"its listing has {len(names(found))} keys, but states {count[:20]}")
    return found


def check_question(listing: ElementTree.Element, query: Mapping[str, str]) -> None:
    """Raise StorageError for a listing that repeats another question than the `query`: it answers that one."""
    for field, name in (("Prefix", "prefix"), ("StartAfter", "start-after")):
        echoed = listing.findtext(field)
        if echoed and echoed != query.get(name, ""):
            raise StorageError(f"its listing is of the {name} {echoed!r:.100}, not {query.get(name, '')!r:.100}")


def names(listing: ElementTree.Element) -> list[str]:
    """Return the names of the objects, or of the multipart uploads, in a listing."""
    kinds = ("Contents", "Upload")
    return [item.findtext("Key", "") for kind in kinds for item in listing.iter(kind)]


def check_write(answer: HttpResponse) -> None:
    """Raise StorageError unless a successful response to the write of an object or a part has the ETag of S3."""
    if not answer.headers.get("etag"):
        raise StorageError("the response to a write has no ETag, so it is not from S3. FIX: check the URL")


def check_completion(answer: HttpResponse) -> None:
    """Raise StorageError unless a successful response says that a multipart upload has been completed."""
    if parse(answer.body).tag != "CompleteMultipartUploadResult":
        raise StorageError("the response to the end of a multipart upload is not from S3. FIX: check the URL")


def upload_id(answer: HttpResponse) -> str:
    """Return the id of the multipart upload that was started. Raises StorageError if the response has none."""
    found = parse(answer.body).findtext("UploadId", "")
    if not found:
        raise StorageError("the response to the start of a multipart upload is not from S3. FIX: check the URL")
    return found


def code(answer: HttpResponse) -> str:
    """Return the error code of a refusal; it may come with status 200, as at the end of a multipart upload."""
    return _field(answer, "Code")


def judge(answer: HttpResponse) -> Verdict:
    """Decide whether the request is worth retrying."""
    said = code(answer)
    if said in _STALE:
        return Verdict.STALE_CREDENTIALS
    temporary = said in _TEMPORARY or is_temporary(answer.status)
    return Verdict.TEMPORARY if temporary else Verdict.FINAL


def reason(answer: HttpResponse) -> str:
    """Describe the refusal in a few words."""
    return f"{answer.status} {code(answer)}".strip()


def as_error(answer: HttpResponse, action: Action, key: str, place: Location) -> StorageError:
    """Return the error for a refusal: what failed, why, and how to fix it."""
    said = code(answer)
    if said == "NoSuchKey" or (answer.status == 404 and not said):
        return MissingError(f"{place.url}: {key} is not there")
    what = f"cannot {action.verb} {key or 'the keys'} {action.preposition} {place.url}"
    kind = FullError if said in _FULL or answer.status == 507 else StorageError
    return kind(f"{what}: {_fix(answer, said, action, place)}")


def _fix(answer: HttpResponse, said: str, action: Action, place: Location) -> str:
    if said == "NoSuchBucket":
        return f"there is no bucket {place.bucket!r}. FIX: create it, or correct the URL"
    if said in _ELSEWHERE or answer.status in (301, 307):
        region = answer.headers.get("x-amz-bucket-region") or _field(answer, "Region") or "another region"
        return f"the bucket is in {region}. FIX: add ?region={region} to the URL, or set $AWS_REGION"
    if said in _STALE:
        return "the AWS credentials have expired, and newly read ones too. FIX: renew them"
    if said == "RequestTimeTooSkewed":
        return (
            f"this machine's clock is wrong (the service's says {answer.headers.get('date', 'otherwise')}). FIX: set it"
        )
    if said in _REFUSED:
        return f"the AWS credentials were refused ({said}). FIX: check the key, and that it is for this endpoint"
    if said in _FULL or answer.status == 507:
        return f"no room ({said or answer.status}). FIX: free some space or choose another storage URL"
    if said == "NotImplemented":
        return "the service does not support checksums. FIX: set $AWS_REQUEST_CHECKSUM_CALCULATION=when_required"
    if answer.status in (401, 403):
        return f"no permission: the credentials in use need {action.permission}"
    message = " ".join(_field(answer, "Message").split())[:200]
    return f"{reason(answer)} {message}".strip()


def _field(answer: HttpResponse, name: str) -> str:
    """Return a field of an error document; "" for any other response."""
    if b"<Error" not in answer.body.lstrip()[:300]:  # after spaces, which S3 sends to keep a long request alive
        return ""
    try:
        return parse(answer.body).findtext(name, "")
    except StorageError:
        return ""
