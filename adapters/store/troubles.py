"""From obstore's errors to ours. obstore names status, code and kind in its text only, so this file alone reads that text.

What leaves says neither bucket nor address nor path.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from obstore.exceptions import AlreadyExistsError, BaseError, PermissionDeniedError, PreconditionError, UnauthenticatedError

from adapters.errors import (
    StoreConflict,
    StoreCredentialsExpired,
    StoreCredentialsMissing,
    StoreCutOff,
    StoreDenied,
    StoreError,
    StoreMisconfigured,
    StoreMissing,
    StoreNoBucket,
    StoreNoConnection,
    StoreThrottled,
    StoreTimedOut,
    StoreUnreachable,
    StoreWrongRegion,
)

RETRY_AFTER_S = 1.0

_STATUS = re.compile(r"status code: (\d{3})|[sS]tatus: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>|\(code: (\w+)\)")
_KIND = re.compile(r"HttpError \{\s*kind: (\w+)")

_THROTTLED = frozenset({"SlowDown", "TooManyRequests", "ThrottlingException", "RequestLimitExceeded", "Throttling"})
_EXPIRED = frozenset({"ExpiredToken", "TokenRefreshRequired", "ExpiredTokenException"})
_DENIED = frozenset({"InvalidToken", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "RequestTimeTooSkewed"})
_WRONG_REGION = frozenset({"AuthorizationHeaderMalformed", "PermanentRedirect", "IllegalLocationConstraintException"})
_MISSING = frozenset({"NoSuchKey", "NoSuchVersion"})
_MISSING_IN_MEMORY = "No data in memory"
_CREDENTIAL_SOURCES = ("169.254.169.254", "latest/api/token", "169.254.170.2", "AssumeRoleWithWebIdentity")
_GIVE_CREDENTIALS = (
    "set `registry.access_key_id` and `registry.secret_access_key`, or AWS' own variables, or give this machine a role"
)
_CLOCK = "RequestTimeTooSkewed"


@contextmanager
def our_errors() -> Iterator[None]:
    """Whatever obstore raises inside leaves as a StoreError."""
    try:
        yield
    except (BaseError, OSError, TimeoutError) as error:
        raise our_error(error) from error


def our_error(error: Exception) -> StoreError:
    """The trouble that an error of obstore speaks of."""
    text = str(error)
    trouble = _Trouble(error, text)
    return next(make(trouble) for applies, make in _RULES if applies(trouble))


class _Trouble:
    """What can be read off an error: the store's `status` and `code`, the HTTP client's `kind` of failure."""

    def __init__(self, error: Exception, text: str) -> None:
        self.error = error
        self.text = text
        status, code, kind = _STATUS.search(text), _CODE.search(text), _KIND.search(text)
        self.status = int(status[1] or status[2]) if status else None
        self.code = (code[1] or code[2]) if code else None
        self.kind = kind[1] if kind else None

    def is_of(self, *classes: type[Exception]) -> bool:
        return isinstance(self.error, classes)

    @property
    def comes_from_credentials(self) -> bool:
        return any(source in self.text for source in _CREDENTIAL_SOURCES)


def _unreachable(trouble: _Trouble) -> StoreError:
    said = f" (status {trouble.status})" if trouble.status else ""
    return StoreUnreachable(f"the store does not answer, or failed{said}", retry_after_s=RETRY_AFTER_S)


def _denied(trouble: _Trouble) -> StoreError:
    hint = "compare this machine's clock" if trouble.code == _CLOCK else None
    return StoreDenied("the store refuses these credentials, or a policy forbids the call", hint=hint)


# The first that applies is the trouble; the order matters only where a code says more than a status.
_Rule = tuple[Callable[[_Trouble], bool], Callable[[_Trouble], StoreError]]
_RULES: tuple[_Rule, ...] = (
    (
        lambda it: it.comes_from_credentials and it.status is not None and (it.status == 429 or it.status >= 500),
        lambda it: StoreUnreachable("the service that hands out credentials failed", retry_after_s=RETRY_AFTER_S),
    ),
    (
        lambda it: it.comes_from_credentials,
        lambda it: StoreCredentialsMissing("no credentials for the store were found", hint=_GIVE_CREDENTIALS),
    ),
    (
        lambda it: it.code == "NoSuchBucket",
        lambda it: StoreNoBucket("the store's bucket does not exist", hint="create it, or correct `registry.url`"),
    ),
    (
        lambda it: it.status == 429 or it.code in _THROTTLED,
        lambda it: StoreThrottled("the store asks to slow down", retry_after_s=RETRY_AFTER_S),
    ),
    (
        lambda it: it.code in _EXPIRED,
        lambda it: StoreCredentialsExpired("the credentials for the store have expired", hint="renew them, or log in again"),
    ),
    (
        lambda it: it.code in _WRONG_REGION or "without LOCATION" in it.text or it.status in (301, 307, 308),
        lambda it: StoreWrongRegion(
            "the store's bucket lies in another region than the settings say", hint="correct `registry.region`"
        ),
    ),
    (
        lambda it: it.status in (401, 403) or it.code in _DENIED or it.is_of(PermissionDeniedError, UnauthenticatedError),
        _denied,
    ),
    (
        lambda it: it.status == 501 or it.code == "NotImplemented",
        lambda it: StoreMisconfigured(
            "the store does not know this call", reason="not_supported", hint="a registry needs conditional writes and listings"
        ),
    ),
    (
        lambda it: it.status in (409, 412) or it.code == "PreconditionFailed",
        lambda it: StoreConflict("a conditional write lost: the object exists or has changed"),
    ),
    (
        lambda it: it.code in _MISSING or _MISSING_IN_MEMORY in it.text,
        lambda it: StoreMissing("the object is not in the store"),
    ),
    (
        # a proxy's 404, or another server's: taken for "not found", it would hide every adapter
        lambda it: it.status == 404 or it.is_of(FileNotFoundError),
        lambda it: StoreMisconfigured("what answers at the store's address is not an object store", value=404),
    ),
    (
        lambda it: it.is_of(AlreadyExistsError, PreconditionError),
        lambda it: StoreConflict("a conditional write lost: the object exists or has changed"),
    ),
    (
        lambda it: it.kind == "Timeout" or it.code == "RequestTimeout",
        lambda it: StoreTimedOut("the store did not answer in time", retry_after_s=RETRY_AFTER_S),
    ),
    (
        lambda it: it.kind == "Connect",
        lambda it: StoreNoConnection("no connection to the store came about", retry_after_s=RETRY_AFTER_S),
    ),
    (
        lambda it: "body error" in it.text or "error decoding" in it.text or it.kind in ("Interrupted", "Decode"),
        lambda it: StoreCutOff("the store's answer broke off in the middle", retry_after_s=RETRY_AFTER_S),
    ),
    (lambda it: True, _unreachable),
)
