"""Errors cross processes whole, and say nothing that clients must not see."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from adapters import errors
from adapters.errors import LoraMuxError


def every_class(cls: type[LoraMuxError] = LoraMuxError) -> list[type[LoraMuxError]]:
    return [cls, *(found for sub in cls.__subclasses__() for found in every_class(sub) if sub.__module__ == errors.__name__)]


@pytest.mark.parametrize("cls", every_class(), ids=lambda cls: cls.__name__)
def test_pickled_with_all_its_data(cls: type[LoraMuxError]) -> None:
    error = cls("too much", reason="rank_too_large", limit=64, value=128, param="model", hint="use less", retry_after_s=1.5)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert (copy.message, copy.details(), str(copy)) == (error.message, error.details(), "too much (use less)")


def test_details_hold_what_was_given() -> None:
    assert errors.ModelNotFound("no").details() == {}
    assert errors.BodyTooLarge("big", limit=0, value=3).details() == {"limit": 0, "value": 3}
    assert str(errors.ModelNotFound("no")) == "no"


def test_store_errors_are_not_absence() -> None:
    assert not issubclass(errors.StoreUnreachable, errors.ModelNotFound)
    kinds = [errors.StoreUnreachable, errors.StoreDenied, errors.StoreThrottled, errors.StoreMissing]
    for kind in kinds:
        assert issubclass(kind, errors.StoreError)
        assert [other for other in kinds if issubclass(other, kind)] == [kind]


def test_every_trouble_of_a_store_has_a_reason_of_its_own_that_the_readme_names() -> None:
    classes = [cls for cls in every_class() if issubclass(cls, errors.StoreError)]
    reasons = [cls("trouble").reason for cls in classes]
    assert len(set(reasons)) == len(classes)
    readme = (Path(errors.__file__).parent / "README.md").read_text()
    assert [reason for reason in reasons if f"`{reason}`" not in readme] == []


def test_a_reason_that_is_given_wins() -> None:
    assert errors.StoreMisconfigured("no", reason="conditional_writes_ignored").reason == "conditional_writes_ignored"
