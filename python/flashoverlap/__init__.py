"""FlashOverlap hides collectives behind the matrix multiplication that makes or uses the data.

>>> import numpy as np, flashoverlap as fo
>>> def layer(comm):
...     rng = np.random.default_rng(comm.rank)
...     x = rng.standard_normal((512, 256), dtype=np.float32)  # this rank's columns of the input
...     w = rng.standard_normal((384, 256), dtype=np.float32)  # and of the weight
...     return fo.gemm_all_reduce(x, w, comm=comm, activation="silu")
>>> y = fo.run_ranks(4, layer)
>>> np.array_equal(y[0], y[3]), y[0].shape
(True, (512, 384))

``flashoverlap.torch`` has layers for PyTorch. docs/python.md describes all of it.
"""

from __future__ import annotations

from . import errors
from ._core import Timeline
from ._core import version as __version__
from .errors import (
    ArgumentTypeError,
    BadArgumentError,
    CommunicationError,
    DeviceError,
    Error,
    FileError,
    InternalError,
    OutOfMemoryError,
    RankError,
    TimeoutError,
    UnsupportedError,
)
from .gathers import AllGatherGemm, ShardedWeightGemm, all_gather_gemm, sharded_weight_gemm
from .heads import AllToAllGemm, GemmAllToAllHeads, all_to_all_gemm, gemm_all_to_all_heads
from .moe import MoeLayer, Routing, moe_layer, route, routing
from .operators import (
    GemmAllReduce,
    GemmAllToAll,
    GemmReduceScatter,
    GradientReduceScatter,
    gemm_all_reduce,
    gemm_all_to_all,
    gemm_reduce_scatter,
    gradient_reduce_scatter,
)
from .planning import (
    Choice,
    MachineProfile,
    PartsChoice,
    Plan,
    Simulation,
    Tuning,
    choose_parts,
    machine_profiles,
    plan,
    predict,
    simulate,
    tune,
    verify,
)
from .ranks import Communicator, run_ranks

__all__ = [
    "AllGatherGemm",
    "AllToAllGemm",
    "ArgumentTypeError",
    "BadArgumentError",
    "Choice",
    "CommunicationError",
    "Communicator",
    "DeviceError",
    "Error",
    "FileError",
    "GemmAllReduce",
    "GemmAllToAll",
    "GemmAllToAllHeads",
    "GemmReduceScatter",
    "GradientReduceScatter",
    "InternalError",
    "MachineProfile",
    "MoeLayer",
    "OutOfMemoryError",
    "PartsChoice",
    "Plan",
    "RankError",
    "Routing",
    "ShardedWeightGemm",
    "Simulation",
    "Timeline",
    "TimeoutError",
    "Tuning",
    "UnsupportedError",
    "__version__",
    "all_gather_gemm",
    "all_to_all_gemm",
    "choose_parts",
    "errors",
    "gemm_all_reduce",
    "gemm_all_to_all",
    "gemm_all_to_all_heads",
    "gemm_reduce_scatter",
    "gradient_reduce_scatter",
    "machine_profiles",
    "moe_layer",
    "plan",
    "predict",
    "route",
    "routing",
    "run_ranks",
    "sharded_weight_gemm",
    "simulate",
    "tune",
    "verify",
]
