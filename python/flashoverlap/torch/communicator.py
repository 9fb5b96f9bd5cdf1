"""A communicator over a torch.distributed process group."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .. import _core
from ..errors import BadArgumentError, UnsupportedError
from ..ranks import _COMMUNICATION_SMS, Communicator, _over_control

_Message = tuple[int, int, int]  # rank in the group, address, bytes


class _Mover:
    """Moves bytes between ranks by the group's send and receive. Called by the compiled half, on its threads."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._ranks = dist.get_process_group_ranks(group)

    def move(self, sends: Sequence[_Message], receives: Sequence[_Message], tag: int, timeout: float) -> None:
        pending: list[tuple[str, int, Any]] = []
        for peer, address, size in receives:
            work = dist.irecv(_bytes_at(address, size), self._ranks[peer], group=self._group, tag=tag)
            pending.append(("from", peer, work))
        for peer, address, size in sends:
            work = dist.isend(_bytes_at(address, size), self._ranks[peer], group=self._group, tag=tag)
            pending.append(("to", peer, work))
        for direction, peer, work in pending:
            try:
                work.wait(timedelta(seconds=timeout))
            except RuntimeError as error:
                text = f"the message {direction} rank {peer} failed: {str(error).splitlines()[0]}"
                if "imed out" in str(error):
                    raise TimeoutError(f"{text} (time-out {timeout} s)") from error
                raise ConnectionError(text) from error

    def subgroup(self, ranks: Sequence[int]) -> _Mover:
        members = [self._ranks[rank] for rank in ranks]
        if members != sorted(members):
            # torch orders a new group's ranks itself; the list of ranks here keeps ours.
            group = dist.new_group(sorted(members), backend="gloo", use_local_synchronization=True)
        else:
            group = dist.new_group(members, backend="gloo", use_local_synchronization=True)
        mover = _Mover(group)
        mover._ranks = members
        return mover


def _bytes_at(address: int, size: int) -> torch.Tensor:
    """Somebody else's memory as a tensor, for the time of a call."""
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8)


def communicator(
    process_group: Any = None,
    *,
    num_threads: int = 0,
    workspace_limit_bytes: int = 0,
    device: int | None = None,
    transport: str = "nccl",
    communication_sms: int = _COMMUNICATION_SMS,
) -> Communicator:
    """The communicator of ``process_group``'s ranks (None: the default group), whatever started them: torchrun, mpirun…

    The group must be able to carry host memory (gloo). Messages travel by the group's send and receive; sums are taken
    in float32 in rank order, as everywhere in this library. Do not use the same group for your own send and receive
    while calls are under way: make one with ``torch.distributed.new_group``. A rank that fails is noticed by the
    others when its process ends, or by their time-out.

    device: compute on this CUDA device, exchange by a communicator of our own; the group, which still must carry host
    memory ("cpu:gloo,cuda:nccl"), then only brings the ranks together. transport, communication_sms: as
    ``flashoverlap.run_ranks`` has them; "peer" and "copy-engine" need all ranks on one host, and tensors outside
    PyTorch's expandable segments.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise BadArgumentError("torch.distributed is not initialised: call torch.distributed.init_process_group first")
    group = process_group if process_group is not None else dist.group.WORLD
    rank = dist.get_rank(group)
    if rank < 0:
        raise BadArgumentError(f"this process (rank {dist.get_rank()}) is not in the process group")
    backend = str(dist.get_backend(group))
    if "gloo" not in backend:
        raise UnsupportedError(
            f"the process group's backend is {backend}; on the CPU expected gloo: "
            "torch.distributed.new_group(backend='gloo')"
        )
    core = _core.make_process_group_communicator(_Mover(group), rank, dist.get_world_size(group))
    return _over_control(
        core,
        device,
        num_threads=num_threads,
        workspace_limit_bytes=workspace_limit_bytes,
        transport=transport,
        communication_sms=communication_sms,
    )
