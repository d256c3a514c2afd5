"""Every error that LoraMux raises on purpose.

    LoraMuxError
    |- InvalidRequest            400   a malformed body, field or header
    |  `- InvalidModelName       400   the model field does not parse
    |- Forbidden                 403   a protected alias, a source that policy does not allow
    |- ModelNotFound             404   unknown base, adapter, alias or version
    |- VersionConflict           409   a lost compare-and-swap
    |- VersionRetired            410
    |- BodyTooLarge              413
    |- AdapterRefused            422   the publish contract says no
    |  |- AdapterIncompatible          it does not fit this base or this engine
    |  `- AdapterCorrupt               its bytes are not what they claim to be
    |- AdapterLoading            503   cold, and the client asked not to wait
    |- StoreError                503
    |  |- StoreUnreachable             a broken connection, a 5xx: what was asked may have been done or not
    |  |  |- StoreNoConnection         no connection came about: nothing was asked
    |  |  |- StoreTimedOut             no answer in time
    |  |  `- StoreCutOff               the answer broke off in the middle
    |  |- StoreDenied                  credentials or policy
    |  |  |- StoreCredentialsExpired
    |  |  `- StoreCredentialsMissing
    |  |- StoreThrottled               slow down
    |  |- StoreMissing                 the key is not there
    |  |- StoreConflict                a conditional write lost
    |  |- StoreMisconfigured           bad address, a store that can't hold a registry
    |  |  |- StoreNoBucket
    |  |  `- StoreWrongRegion
    |  `- StoreFull                    the disk under a folder store is full
    |- DiskFull                  503   the node cache has no room
    |- Overloaded                503
    |- EngineUnavailable         503
    |- DeadlineExceeded          504
    `- InternalError             500

Errors cross process borders (Ray pickles them), so they hold plain data and rebuild from it. The status codes stand in one
table, `gateway.errors`; they are repeated above for the reader only.
"""

from __future__ import annotations

from typing import Any


class LoraMuxError(Exception):
    """Base of all. `message` is safe to show to a client: it names limits and values, never buckets, paths or traces.

    `reason` is a machine-readable sub-code (a refusal code of the publish contract, say; every store error has its own),
    `limit` and `value` what was allowed and what was found, `param` the request field at fault, `retry_after_s` when a retry
    makes sense.
    """

    code = "internal_error"
    default_reason: str | None = None

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        limit: Any = None,
        value: Any = None,
        param: str | None = None,
        hint: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.limit = limit
        self.value = value
        self.param = param
        self.hint = hint
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.details())

    def details(self) -> dict[str, Any]:
        """The data beside the message, as keyword arguments of the constructor."""
        names = ("reason", "limit", "value", "param", "hint", "retry_after_s")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


def _rebuild(cls: type[LoraMuxError], message: str, details: dict[str, Any]) -> LoraMuxError:
    return cls(message, **details)


class InvalidRequest(LoraMuxError):
    """The body, a field or a header is malformed."""

    code = "invalid_request"


class InvalidModelName(InvalidRequest):
    """The model field does not parse as `base`, `base:name`, `base:name@7` or `base:name@alias`."""

    code = "invalid_model_name"


class Forbidden(LoraMuxError):
    """The caller may not do this; `reason` says which rule forbids it."""

    code = "forbidden"


class ModelNotFound(LoraMuxError):
    """No such base, adapter, alias or version, or not this caller's."""

    code = "model_not_found"


class VersionConflict(LoraMuxError):
    """A compare-and-swap lost: the adapter moved on since the caller looked. `value` is the current revision."""

    code = "version_conflict"


class VersionRetired(LoraMuxError):
    """The version exists but was retired; it can come back."""

    code = "version_retired"


class BodyTooLarge(LoraMuxError):
    """The request body is over `limit` bytes."""

    code = "body_too_large"


class AdapterRefused(LoraMuxError):
    """The publish contract refuses; `reason` is the refusal's code, with `limit` and `value` where there are any."""

    code = "adapter_incompatible"


class AdapterIncompatible(AdapterRefused):
    """The adapter is whole, but does not fit this base or cannot be served by the engine."""

    code = "adapter_incompatible"


class AdapterCorrupt(AdapterRefused):
    """The adapter's bytes are broken: a bad header, a digest that differs, NaN."""

    code = "adapter_corrupt"


class AdapterLoading(LoraMuxError):
    """The adapter is cold and the client asked not to wait (`x-loramux-cold: fail`)."""

    code = "adapter_loading"


class StoreError(LoraMuxError):
    """The object store failed; which way is the subclass, and its `reason` says so on the wire. Never "not found" by accident."""

    code = "storage_unavailable"
    default_reason = "store_failed"


class StoreUnreachable(StoreError):
    """A broken connection or a server error. A write may have taken place or not."""

    default_reason = "unreachable"


class StoreNoConnection(StoreUnreachable):
    """No connection came about (refused, no such host), so nothing was asked and nothing written."""

    default_reason = "no_connection"


class StoreTimedOut(StoreUnreachable):
    """No answer within `request_timeout_s`. A write may have taken place or not."""

    default_reason = "timed_out"


class StoreCutOff(StoreUnreachable):
    """The connection closed in the middle of the answer."""

    default_reason = "cut_off"


class StoreDenied(StoreError):
    """Credentials or policy forbid the call."""

    default_reason = "denied"


class StoreCredentialsExpired(StoreDenied):
    """The credentials were good once."""

    default_reason = "credentials_expired"


class StoreCredentialsMissing(StoreDenied):
    """Neither the settings nor the environment hold credentials."""

    default_reason = "credentials_missing"


class StoreThrottled(StoreError):
    """The store asks to slow down; nothing was written."""

    default_reason = "throttled"


class StoreMissing(StoreError):
    """The key is not in the store."""

    default_reason = "missing"


class StoreConflict(StoreError):
    """A conditional write lost: the key exists (create) or has another ETag (update)."""

    default_reason = "conflict"


class StoreMisconfigured(StoreError):
    """The address makes no sense, or what is there can't hold a registry."""

    default_reason = "misconfigured"


class StoreNoBucket(StoreMisconfigured):
    """The bucket does not exist."""

    default_reason = "no_bucket"


class StoreWrongRegion(StoreMisconfigured):
    """The bucket lies in another region than the settings say."""

    default_reason = "wrong_region"


class StoreFull(StoreError):
    """The disk under a folder store is full."""

    default_reason = "store_full"


class DiskFull(LoraMuxError):
    """The node cache can't make room: `limit` is the budget in bytes, `value` what is asked for."""

    code = "storage_unavailable"


class Overloaded(LoraMuxError):
    """Every place that could take the request is in use."""

    code = "overloaded"


class EngineUnavailable(LoraMuxError):
    """No replica of this base can answer: starting, dead or restarting."""

    code = "engine_unavailable"


class DeadlineExceeded(LoraMuxError):
    """The client's own limit (`x-loramux-timeout-ms`) or the server's passed."""

    code = "deadline_exceeded"


class InternalError(LoraMuxError):
    """Something that should never happen; the trace is in the log under the request id."""

    code = "internal_error"
