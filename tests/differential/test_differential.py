"""A few cases of each family match the reference; ``python -m tests.differential`` runs any number, with any seed."""

from __future__ import annotations

import pytest

from .cases import FAMILIES
from .report import too_many_refused
from .runner import run


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_random_cases_are_those_of_the_reference(name: str) -> None:
    results = run(name, seed=1, indices=range(50), jobs=1)
    wrong = [
        f"python -m tests.differential {name} --seed 1 --case {r.index}\n{r.outcome.kind}: {r.outcome.text}"
        for r in results
        if r.outcome.failed
    ]
    assert not wrong, "\n".join(wrong)
    assert not too_many_refused(results)
