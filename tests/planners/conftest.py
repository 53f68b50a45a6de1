"""Hypothesis profiles: ``--hypothesis-profile=thousands`` is what ``make properties`` runs."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("thousands", max_examples=2000, deadline=None)
