"""Tensor parallelism in one, two, 2.5 and three dimensions: grids of devices, rules, and what each of them sends."""

from jaxpar.analysis.tensor_parallelism import TensorPlan, TensorPlans, compare_tensor
from jaxpar.parallel.tensor.grid import KINDS, grid, rules
from jaxpar.parallel.tensor.route import MatmulRoute
from jaxpar.parallel.tensor.traffic import Matmuls, Sent

__all__ = ["KINDS", "MatmulRoute", "Matmuls", "Sent", "TensorPlan", "TensorPlans", "compare_tensor", "grid", "rules"]
