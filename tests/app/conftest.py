"""A job made from the keys of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from run_keys import CONFIGS

from jaxpar.app.config import load_run
from jaxpar.app.job import Job, make_job


@pytest.fixture
def job_of(tmp_path: Path) -> Any:
    def make(**keys: Any) -> Job:
        file = tmp_path / "run.yaml"
        run = {"model": {"family": "llama", "layers": 1}, "layout": str(CONFIGS / "layouts" / "dp.yaml")}
        file.write_text(yaml.safe_dump(run | keys))
        return make_job(load_run(file))

    return make
