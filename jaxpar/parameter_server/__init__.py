"""Parameter servers on Ray: workers that train at their own pace, sparse tables, and members that come and go."""

from jaxpar.parameter_server.cluster import LoadProgram
from jaxpar.parameter_server.config import ServerConfig
from jaxpar.parameter_server.pieces import SparseTable
from jaxpar.parameter_server.program import TrainingProgram
from jaxpar.parameter_server.run import ServerRun, ServerRunResult, train
from jaxpar.parameter_server.worker import WorkerReport

__all__ = [
    "LoadProgram",
    "ServerConfig",
    "ServerRun",
    "ServerRunResult",
    "SparseTable",
    "TrainingProgram",
    "WorkerReport",
    "train",
]
