"""Other libraries' models under `deferred_init`, unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest

from test_clients import needs, reports

pytestmark = pytest.mark.slow


@needs("transformers")
def test_models_of_transformers(tmp_path: Path) -> None:
    """Language, vision, experts and state spaces: every value is the plain constructor's."""
    for differences in reports("build_deferred.py", tmp_path):
        assert len(differences) == 10
        assert not any(differences.values()), differences
