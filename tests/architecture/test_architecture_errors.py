# SPDX-License-Identifier: Apache-2.0
"""Every exception of raydist crosses a process boundary whole. Nothing is faked."""

from __future__ import annotations

import copy
import inspect
import pickle
from dataclasses import fields
from typing import Any

import pytest

from raydist import errors
from raydist.errors import FailureKind, RaydistError

_EXAMPLES = {"str": "text é", "int": 7, "float": 2.5, "bool": True, "int | None": 3}
_ERRORS = [
    value
    for _, value in inspect.getmembers(errors, inspect.isclass)
    if issubclass(value, RaydistError)
]


def _example(error: type[RaydistError]) -> RaydistError:
    values: dict[str, Any] = {f.name: _EXAMPLES[str(f.type)] for f in fields(error)}
    return error(**values)


@pytest.mark.parametrize("error", _ERRORS)
def test_error_pickled_comes_back_with_its_type_fields_and_text(error: type[RaydistError]) -> None:
    original = _example(error)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        back = pickle.loads(pickle.dumps(original, protocol))
        assert type(back) is error
        for field in fields(error):
            assert getattr(back, field.name) == getattr(original, field.name)
        assert str(back) == str(original)
        assert back.kind is error.kind


@pytest.mark.parametrize("error", _ERRORS)
def test_error_copied_keeps_its_fields(error: type[RaydistError]) -> None:
    original = _example(error)
    assert vars(copy.copy(original)) == vars(original)


@pytest.mark.parametrize("error", _ERRORS)
def test_error_is_raised_and_caught_by_its_root_with_a_text(error: type[RaydistError]) -> None:
    with pytest.raises(RaydistError) as caught:
        raise _example(error)
    assert str(caught.value).strip()
    assert not isinstance(caught.value, AssertionError)


def test_errors_are_all_found() -> None:
    def below(error: type[RaydistError]) -> set[type[RaydistError]]:
        return {error}.union(*(below(e) for e in error.__subclasses__()))

    own = {e for e in below(RaydistError) if e.__module__.startswith("raydist.")}
    assert own == set(_ERRORS)
    assert len(_ERRORS) >= 15


def test_exit_statuses_are_frozen() -> None:
    """Scripts and schedulers of users act on them."""
    assert {kind.name: kind.exit_code for kind in FailureKind} == {
        "INPUT": 2,
        "USER_CODE": 3,
        "WORKER_LOST": 4,
        "STORAGE": 5,
        "NUMERICS": 6,
        "FENCED": 7,
        "INTERRUPTED": 130,
    }


def test_error_text_is_the_problem_and_the_way_out_below_it() -> None:
    assert str(RaydistError(problem="It broke.")) == "It broke."
    assert str(RaydistError(problem="It broke.", way_out="Mend it.")) == "It broke.\n  Mend it."
