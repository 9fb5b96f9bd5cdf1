"""Ranks: as threads of this process, as processes of a launcher, and groups of them."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from . import _core
from ._devices import HOST
from .errors import BadArgumentError, CommunicationError, RankError, TimeoutError, UnsupportedError

Result = TypeVar("Result")

_COMMUNICATION_SMS = 16  # As CudaOptions has it.


class Communicator:
    """One rank's place in a group of ranks. All ranks make the same calls in the same order.

    Use it from one thread at a time. A call that cannot finish, because a rank failed, made another call or did not
    come within ``timeout`` seconds, raises on every rank; the communicator is of no use after that.

    num_threads: compute threads of this rank; 0: cores of this machine / ranks here, at least 1.
    workspace_limit_bytes: a call that needs more raises OutOfMemoryError on all ranks; 0: no limit.
    """

    def __init__(
        self,
        core: _core.Communicator,
        *,
        num_threads: int = 0,
        workspace_limit_bytes: int = 0,
        poison_workspace: bool = False,
        place: _core.GpuPlace | None = None,
    ) -> None:
        self._core = core
        self._place = place
        self._device = HOST if place is None else place.device
        self._rank = core.rank  # Plain numbers: torch.compile can look at them.
        self._size = core.size
        self._num_threads = num_threads
        self._workspace_limit_bytes = workspace_limit_bytes
        self._poison_workspace = poison_workspace
        self._context: _core.Context | None = None
        self._operators: dict[Any, Any] = {}

    @staticmethod
    def from_environment(
        *,
        num_threads: int = 0,
        workspace_limit_bytes: int = 0,
        device: int | None = None,
        transport: str = "nccl",
        communication_sms: int = _COMMUNICATION_SMS,
    ) -> Communicator:
        """The communicator between the processes that mpirun, srun or torchrun started; alone: one rank.

        On CPUs the data travels by MPI, so that the package must have been built where MPI was installed, and the
        launcher must be one that MPI knows (mpirun, srun with PMI). For processes of torchrun use
        ``flashoverlap.torch.communicator``.

        device: compute on this CUDA device; MPI then only brings the ranks together. transport, communication_sms: as
        run_ranks has them; "peer" and "copy-engine" need all ranks on one host.
        """
        options: dict[str, Any] = {
            "num_threads": num_threads,
            "workspace_limit_bytes": workspace_limit_bytes,
            "transport": transport,
            "communication_sms": communication_sms,
        }
        launch = _core.detect_launch()
        if launch is None or launch["world_size"] == 1:
            return _over_control(_core.in_process_communicators(1)[0], device, **options)
        place = f"{launch['launcher']} started rank {launch['rank']} of {launch['world_size']}"
        if not _core.mpi_library_name():
            raise UnsupportedError(
                f"{place}, but this package was built without MPI; install MPI and build again, or use "
                "flashoverlap.torch.communicator"
            )
        core = _core.make_mpi_communicator()
        if core.size != launch["world_size"]:
            raise CommunicationError(
                f"{place}, but MPI ({_core.mpi_library_name()}) sees {core.size} rank(s): start the processes with "
                "mpirun, or use flashoverlap.torch.communicator"
            )
        return _over_control(core, device, **options)

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    @property
    def name(self) -> str:
        """ "in-process", "mpi" or "process-group"; on GPUs what their collectives are called."""
        return self._core.name

    @property
    def device(self) -> int | None:
        """The CUDA device that this rank computes on, where its arrays must be; None: the CPU."""
        return None if self._device == HOST else self._device

    @property
    def timeout(self) -> float:
        """Seconds that a call waits for other ranks."""
        return self._core.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._core.timeout = seconds

    @property
    def num_threads(self) -> int:
        """Compute threads of this rank."""
        return self._get_context().num_threads

    @property
    def workspace_bytes(self) -> int:
        """Bytes of workspace that this rank holds."""
        return self._get_context().workspace_bytes

    def subgroup(self, ranks: Sequence[int]) -> Communicator:
        """A communicator of the listed ranks of this one, in that order. Only they call it, with the same list."""
        return Communicator(
            self._core.subgroup([int(rank) for rank in ranks]),
            num_threads=self._num_threads,
            workspace_limit_bytes=self._workspace_limit_bytes,
            poison_workspace=self._poison_workspace,
            place=self._place,
        )

    def barrier(self) -> None:
        """Returns once all ranks have come here."""
        self._core.barrier()

    def exchange(self, value: bytes) -> list[bytes]:
        """Everybody's value, by rank. For a few bytes: agreement, not data."""
        return self._core.exchange(value)

    def abort(self, reason: str) -> None:
        """Makes every rank's pending and future calls raise CommunicationError with this rank and reason."""
        self._core.abort(reason)

    def use_tuner(self, machine: Any = None, *, cache: str | None = None) -> None:
        """What later calls leave open ("auto") is chosen by prediction for ``machine`` and from a tuning cache.

        Collective, with a tuner on all ranks; rank 0's decides. machine: a MachineProfile, the name of one that
        ships, or a file; None: nothing is predicted. cache: the file of ``flashoverlap tune``; entries of another
        machine, or damaged ones, are refused with a warning and never used.
        """
        from .planning import cpu_name, profile_file

        with profile_file(machine) as path:
            self._get_context().use_tuner(path, cache or "", cpu_name(), _warn)
        self._operators.clear()

    def _get_context(self) -> _core.Context:
        if self._context is None and self._place is not None:
            self._context = _core.make_gpu_context(
                self._core, self._place, self._workspace_limit_bytes, self._poison_workspace
            )
        elif self._context is None:
            self._context = _core.make_context(
                self._core, self._num_threads, self._workspace_limit_bytes, self._poison_workspace
            )
        return self._context

    def __repr__(self) -> str:
        return f"<flashoverlap.Communicator {self.name}: rank {self.rank} of {self.size}>"


def _over_control(
    control: _core.Communicator, device: int | None, *, transport: str, communication_sms: int, **options: Any
) -> Communicator:
    """On the CPU ``control`` itself; otherwise exchange between devices, which ``control`` brings together."""
    _check_transport(transport)
    if device is None:
        return Communicator(control, **options)
    by_engine = transport == "copy-engine"
    place = _core.place_on_gpus([int(device)], 0, int(communication_sms), by_engine)[0]
    if transport == "nccl":
        core = _core.make_nccl_communicator(control, place.device, place.communication_sms)
    else:
        core = _core.make_peer_communicator(control, place.device, place.communication_sms, by_engine)
    return Communicator(core, place=place, **options)


def _check_transport(transport: str) -> None:
    if transport not in ("peer", "copy-engine", "nccl"):
        raise BadArgumentError(f"transport is {transport!r}; expected 'peer', 'copy-engine' or 'nccl'")


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=2)


def run_ranks(
    world_size: int,
    function: Callable[[Communicator], Result],
    *,
    num_threads: int = 0,
    workspace_limit_bytes: int = 0,
    poison_workspace: bool = False,
    bandwidth_gbps: float = 0,
    latency_us: float = 0,
    timeout: float = 0,
    devices: Sequence[int] | None = None,
    compute_sms: int = 0,
    communication_sms: int = _COMMUNICATION_SMS,
    transport: str = "peer",
) -> list[Result]:
    """Calls ``function(comm)`` once per rank, each on a thread of this process; returns the results by rank.

    When a rank raises, the others are stopped (their next or pending call raises) and RankError is raised here,
    naming the rank that failed first of itself, with its exception as ``__cause__``. A rank that returns while others
    still wait for a call of it ends them too.

    bandwidth_gbps, latency_us: pace the link between the ranks to study overlap; 0: as fast as memory.
    timeout: seconds that a call waits for other ranks; 0: the default of 60.

    devices: compute on GPUs: the CUDA device of each rank. Where ranks share one, compute_sms is the SMs of each, a
    multiple of 8. communication_sms: of each device, left to the exchange. transport: "peer" (kernels read the other
    ranks' memory), "copy-engine" (copies take no SM, and partial sums are added behind the GEMM; communication_sms may
    be 0) or "nccl".
    """
    if not callable(function):
        raise BadArgumentError(f"function is {function!r}; expected something to call with a communicator")
    gpus = None
    if devices is not None:
        gpus = _Gpus(world_size, devices, compute_sms, communication_sms, transport, (bandwidth_gbps, latency_us))
    run = _Run(world_size, function, gpus, num_threads, workspace_limit_bytes, poison_workspace)
    # On a thread of its own, so that this one can hear the user's Ctrl-C.
    thread = threading.Thread(
        target=run.run, args=(float(bandwidth_gbps), float(latency_us), float(timeout)), name="run_ranks"
    )
    thread.start()
    try:
        thread.join()
    except BaseException as error:
        run.stop(f"interrupted: {type(error).__name__}")
        thread.join()
        raise
    return run.results()


class _Gpus:
    """Where the ranks of one call of run_ranks compute, and how they exchange."""

    def __init__(
        self,
        world_size: int,
        devices: Sequence[int],
        compute_sms: int,
        communication_sms: int,
        transport: str,
        link: tuple[float, float],
    ) -> None:
        listed = [int(device) for device in devices]
        if len(listed) != world_size:
            raise BadArgumentError(
                f"devices has {len(listed)} entries; expected one for each of the {world_size} ranks"
            )
        _check_transport(transport)
        if transport == "nccl" and link[0] > 0:
            raise UnsupportedError(f"bandwidth_gbps is {link[0]}: NCCL cannot be paced; expected transport 'peer'")
        by_engine = transport == "copy-engine"
        sms = int(communication_sms)
        self.places = _core.place_on_gpus(listed, int(compute_sms), sms, by_engine)
        self._sharing = max((listed.count(device) for device in listed), default=1)
        self._peers: list[_core.Communicator] = []
        if transport != "nccl":
            self._peers = _core.make_peer_communicators(listed, sms, by_engine, float(link[0]), float(link[1]))

    def communicator(self, control: _core.Communicator) -> _core.Communicator:
        if self._peers:
            return self._peers[control.rank]
        place = self.places[control.rank]
        ctas = max(1, place.communication_sms // self._sharing)
        return _core.make_nccl_communicator(control, place.device, ctas)


class _Run:
    """One call of run_ranks."""

    def __init__(
        self, world_size: int, function: Callable[[Communicator], Any], gpus: _Gpus | None, *options: Any
    ) -> None:
        self._world_size = world_size
        self._gpus = gpus
        self._function = function
        self._options = options
        self._values: dict[int, Any] = {}
        self._communicators: list[_core.Communicator] = []
        self._failures: list[tuple[int, BaseException]] = []  # In the order in which they came.
        self._error: BaseException | None = None

    def run(self, *link: float) -> None:
        try:
            _core.run_ranks(self._world_size, self._on_rank, *link)
        except BaseException as error:
            self._error = error

    def _on_rank(self, core: _core.Communicator) -> str:
        rank = core.rank
        self._communicators.append(core)
        threading.current_thread().name = f"rank {rank}"
        try:
            self._values[rank] = self._function(self._communicator(core))
        except BaseException as error:
            self._failures.append((rank, error))
            if self._gpus is not None:
                self._abort(f"rank {rank}: {error}")
            return f"{type(error).__name__}: {error}"
        return ""

    def _communicator(self, control: _core.Communicator) -> Communicator:
        num_threads, limit, poison = self._options
        core, place = control, None
        if self._gpus is not None:
            core, place = self._gpus.communicator(control), self._gpus.places[control.rank]
            self._communicators.append(core)
        return Communicator(
            core, num_threads=num_threads, workspace_limit_bytes=limit, poison_workspace=poison, place=place
        )

    def stop(self, reason: str) -> None:
        self._abort(reason)

    def _abort(self, reason: str) -> None:
        for core in list(self._communicators):
            core.abort(reason)

    def results(self) -> list[Any]:
        if self._failures:
            # Ranks that only heard of another one's failure may have been faster than that one.
            echoes = (CommunicationError, TimeoutError)
            own = [failure for failure in self._failures if not isinstance(failure[1], echoes)]
            rank, cause = (own or self._failures)[0]
            raise RankError(rank, self._world_size, cause) from cause
        if self._error is not None:
            raise self._error
        return [self._values[rank] for rank in range(self._world_size)]
