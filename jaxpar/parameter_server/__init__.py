"""Parameter servers on Ray: workers that train at their own pace, sparse tables, and members that come and go."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxpar.utils.public_names import public_names

if TYPE_CHECKING:
    from jaxpar.parameter_server.cluster import LoadProgram as LoadProgram
    from jaxpar.parameter_server.config import ServerConfig as ServerConfig
    from jaxpar.parameter_server.pieces import SparseTable as SparseTable
    from jaxpar.parameter_server.program import TrainingProgram as TrainingProgram
    from jaxpar.parameter_server.run import ServerRun as ServerRun
    from jaxpar.parameter_server.run import ServerRunResult as ServerRunResult
    from jaxpar.parameter_server.run import train as train
    from jaxpar.parameter_server.worker import WorkerReport as WorkerReport
else:
    __getattr__, __dir__, __all__ = public_names(__name__, __file__)
