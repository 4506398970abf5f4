"""Hypothesis profiles: ``fast`` by default, ``thorough`` with ``pytest --hypothesis-profile thorough``."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

settings.register_profile("fast", deadline=None)
settings.register_profile("thorough", deadline=None, max_examples=1000)


def examples(fast: int = 100, **options: Any) -> settings:
    """Settings of a property test: ``fast`` examples by default, ten times as many in the profile ``thorough``."""
    thorough = settings.get_current_profile_name() == "thorough"
    return settings(max_examples=10 * fast if thorough else fast, deadline=None, **options)
