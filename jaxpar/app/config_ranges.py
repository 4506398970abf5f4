"""Ranges of the numbers in a configuration.

Commands trace a step without its devices: numbers beyond those of any run are refused before that overflows.
"""

from __future__ import annotations

from typing import Annotated

from jaxpar.utils.checks import INT32, Range

Count = Annotated[int, Range(1, INT32)]
Natural = Annotated[int, Range(0, INT32)]
BatchSize = Annotated[int, Range(1, 2**20)]
Positive = Annotated[float, Range(0, 1e38, above=True)]
Bytes = Annotated[int, Range(0, 2**62)] | str
NonNegative = Annotated[float, Range(0, 1e38)]
Share = Annotated[float, Range(0, 1.0)]
AboveOne = Annotated[float, Range(1, 1e38, above=True)]
