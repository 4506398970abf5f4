"""The reference in NumPy computes what transformers does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from llama_numpy import logits_of

GOLDEN = Path(__file__).parents[1] / "golden" / "huggingface"


@pytest.mark.parametrize("name", ["llama2", "llama3"])
def test_the_reference_has_the_logits_of_transformers(name: str) -> None:
    """llama3 has the rotary scaling of Llama 3.1 and tied embeddings."""
    answers = np.load(GOLDEN / name / "answers.npz")
    np.testing.assert_allclose(logits_of(GOLDEN / name, answers["tokens"]), answers["logits"], rtol=0, atol=1e-5)
