# SPDX-License-Identifier: Apache-2.0
"""What went wrong between boto3 and the store: as plain data, and as a sentence with a way out."""

from __future__ import annotations

from botocore import exceptions as sdk
from botocore.parsers import ResponseParserError
from urllib3.exceptions import HTTPError

from raydist.errors import ObjectMissingError, StorageError
from raydist.storage.retry import Breakage, RequestFailure, is_retryable

REQUEST_ERRORS = (sdk.ClientError, sdk.BotoCoreError, ResponseParserError, HTTPError)
"""Everything a request, or reading the body of its reply, can raise."""

_UNREACHED = (
    sdk.EndpointConnectionError,
    sdk.ConnectTimeoutError,
    sdk.ProxyConnectionError,
    sdk.SSLError,
    sdk.CredentialRetrievalError,
    sdk.MetadataRetrievalError,
)
_CUT = (
    sdk.HTTPClientError,
    sdk.ConnectionError,
    sdk.IncompleteReadError,
    sdk.FlexibleChecksumError,
    ResponseParserError,
    HTTPError,
)
_EXPIRED_CODES = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"})


def failure_of(error: Exception) -> RequestFailure:
    """Reduce one of ``REQUEST_ERRORS`` to the facts that decide about it."""
    if isinstance(error, sdk.ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        code = str(error.response.get("Error", {}).get("Code", ""))
        return RequestFailure(breakage=Breakage.ANSWERED, http_status=status, code=code)
    if isinstance(error, _UNREACHED):
        return RequestFailure(breakage=Breakage.UNREACHED)
    if isinstance(error, _CUT):
        return RequestFailure(breakage=Breakage.CUT)
    return RequestFailure(breakage=Breakage.REFUSED_HERE)


def deserves_retry(error: Exception) -> bool:
    """Classify for ``call_with_retry``; errors that are not a request's are final."""
    return isinstance(error, REQUEST_ERRORS) and is_retryable(failure_of(error))


def is_expired(error: sdk.ClientError) -> bool:
    """Whether newer credentials may cure this; a HEAD has no body and says 400 only."""
    failure = failure_of(error)
    bare_400 = error.operation_name.startswith("Head") and failure.http_status == 400
    return failure.code in _EXPIRED_CODES or bare_400


def is_missing_object(failure: RequestFailure) -> bool:
    """Whether the store says that the key has no object (a HEAD says 404 only)."""
    return failure.code in ("NoSuchKey", "404", "NotFound")


def explain(error: Exception, *, action: str, key: str, url: str, place: str) -> StorageError:
    """Make the StorageError for a request that failed for good.

    Args:
        error: One of ``REQUEST_ERRORS``.
        action: What was tried, such as ``write``.
        key: The object's key, as the caller knows it.
        url: The object's s3:// URL.
        place: Region or endpoint.

    Returns:
        ObjectMissingError where the store says so, else a StorageError with a way out. Neither
        holds a secret: of the server's words only its code and message are kept.
    """
    failure = failure_of(error)
    if is_missing_object(failure):
        return ObjectMissingError(key=key)
    if isinstance(error, sdk.ClientError):
        reason, way_out = _explain_answer(error, failure)
    else:
        reason, way_out = _explain_silence(error)
    return StorageError(problem=f"Cannot {action} {url} ({place}): {reason}.", way_out=way_out)


def _explain_answer(error: sdk.ClientError, failure: RequestFailure) -> tuple[str, str]:
    message = str(error.response.get("Error", {}).get("Message", "")).strip().rstrip(".")[:300]
    says = f"{failure.code or 'no code'}, HTTP {failure.http_status}"
    reason = f"the store answers {says}" + (f", {message}" if message else "")
    if failure.code in _EXPIRED_CODES:
        return reason, (
            "Renew the credentials, or use a source that renews itself: an instance role, pod "
            "identity or a profile."
        )
    return reason, _WAYS_OUT.get(failure.code, _OTHER)


def _explain_silence(error: Exception) -> tuple[str, str]:
    name = type(error).__name__
    if isinstance(error, (sdk.NoCredentialsError, sdk.PartialCredentialsError)):
        return "no credentials found", (
            "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or give the machines "
            "a role."
        )
    if isinstance(error, sdk.SSLError):
        return f"TLS failed, {_root_cause(error)}", (
            "An endpoint that speaks plain HTTP needs http://; a private certificate authority "
            "goes into AWS_CA_BUNDLE."
        )
    if isinstance(error, (sdk.CredentialRetrievalError, sdk.MetadataRetrievalError)):
        return f"the source of the credentials failed ({name})", (
            "Check the role, profile or credential process of this machine."
        )
    if isinstance(error, _UNREACHED):
        return f"unreachable, {_root_cause(error)}", (
            "Check AWS_ENDPOINT_URL_S3 or AWS_REGION, the route from this machine and its proxy."
        )
    if isinstance(error, _CUT):
        return f"the reply was lost or cut, {_root_cause(error)}", _OTHER
    return f"the SDK refuses, {name}: {error}", "Correct the name or the AWS settings it speaks of."


def _root_cause(error: BaseException) -> str:
    """Return the system's words below the layers of urllib3 and botocore."""
    seen: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in seen:
        seen.append(current)
        wrapped = getattr(current, "kwargs", {}).get("error")
        if isinstance(wrapped, BaseException):
            current = wrapped
        else:
            current = current.__cause__ or current.__context__
    deepest = seen[-1]
    words = deepest.strerror if isinstance(deepest, OSError) else ""
    return f"{type(deepest).__name__}: {words}" if words else type(deepest).__name__


_OTHER = "Check the store's health; another --storage is the way round it."
_CREDENTIALS = "Correct AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, the profile or the role."
_DENIED = (
    "Allow the credentials s3:GetObject, s3:PutObject, s3:DeleteObject, "
    "s3:AbortMultipartUpload and s3:ListBucket there, or choose another --storage."
)
_REGION = "The bucket is in another region: set AWS_REGION to that one."
_WAYS_OUT = {
    "AccessDenied": _DENIED,
    "AllAccessDisabled": _DENIED,
    "403": _DENIED,
    "Forbidden": _DENIED,
    "NoSuchBucket": "Create the bucket (raydist never does), or correct --storage.",
    "InvalidBucketName": "Correct the bucket's name in --storage.",
    "InvalidAccessKeyId": _CREDENTIALS,
    "SignatureDoesNotMatch": _CREDENTIALS,
    "InvalidToken": _CREDENTIALS,
    "AuthorizationHeaderMalformed": _REGION,
    "PermanentRedirect": _REGION,
    "IllegalLocationConstraintException": _REGION,
    "301": _REGION,
    "RequestTimeTooSkewed": "Set this machine's clock; S3 allows 15 minutes.",
    "KeyTooLongError": "Shorten the run's name or the prefix in --storage.",
    "EntityTooLarge": "The store refuses objects of that size; choose another --storage.",
    "NotImplemented": "The store lacks this operation; choose another --storage.",
}
