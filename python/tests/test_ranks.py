"""Communicators and run_ranks: results, errors, groups."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
from conftest import d1_a, d1_b

import flashoverlap as fo


def test_results_come_in_rank_order():
    assert fo.run_ranks(5, lambda comm: (comm.rank, comm.size, comm.name)) == [
        (rank, 5, "in-process") for rank in range(5)
    ]


def test_an_exception_on_one_rank_names_it_and_stops_the_others():
    stopped = []

    def on_rank(comm):
        if comm.rank == 2:
            raise LookupError("nothing there")
        try:
            comm.barrier()
        except fo.CommunicationError as error:
            stopped.append((comm.rank, str(error)))
            raise

    with pytest.raises(fo.RankError, match="rank 2 of 4: LookupError: nothing there") as caught:
        fo.run_ranks(4, on_rank)
    assert caught.value.rank == 2
    assert isinstance(caught.value.__cause__, LookupError)
    assert sorted(rank for rank, _ in stopped) == [0, 1, 3]
    assert all("rank 2" in text for _, text in stopped)


def test_a_rank_that_returns_early_ends_those_that_wait_for_it():
    with pytest.raises(fo.RankError, match=r"rank 0 of 2.*rank 1"):
        fo.run_ranks(2, lambda comm: comm.barrier() if comm.rank == 0 else None)


def test_a_rank_that_does_not_come_is_a_timeout():
    def on_rank(comm):
        if comm.rank == 0:
            with pytest.raises(TimeoutError, match="rank 1") as caught:
                comm.barrier()
            assert isinstance(caught.value, fo.TimeoutError)
            late.set()
        else:
            assert late.wait(60)

    late = threading.Event()
    fo.run_ranks(2, on_rank, timeout=0.2)


def test_timeout_of_a_communicator():
    def on_rank(comm):
        assert comm.timeout == 5
        comm.timeout = 2.5
        assert comm.timeout == 2.5
        with pytest.raises(ValueError, match=r"timeout is 0 s; expected 0\.001 to"):
            comm.timeout = 0

    fo.run_ranks(2, on_rank, timeout=5)


def test_subgroup_has_the_ranks_in_the_order_listed():
    # B05 (c): the data is keyed by the global rank.
    def on_rank(comm):
        if comm.rank < 2:
            return None
        group = comm.subgroup([3, 2])
        a, b = d1_a(comm.rank, 64, 64), d1_b(comm.rank, 64, 64)
        whole = fo.gemm_all_reduce(a, b, comm=group)
        part = fo.gemm_reduce_scatter(a, b, comm=group)
        return group.rank, group.size, whole, part

    results = fo.run_ranks(4, on_rank)
    whole = results[2][2]
    assert (whole[0, 0], whole[63, 63]) == (-52, 71)
    assert [result[:2] for result in results[2:]] == [(1, 2), (0, 2)]
    np.testing.assert_array_equal(results[3][3], whole[:32])
    np.testing.assert_array_equal(results[2][3], whole[32:])


def test_exchange_and_barrier():
    def on_rank(comm):
        comm.barrier()
        return comm.exchange(bytes([comm.rank]) * comm.rank)

    assert fo.run_ranks(3, on_rank) == [[b"", b"\1", b"\2\2"]] * 3


def test_abort_reaches_the_others():
    def on_rank(comm):
        if comm.rank == 0:
            comm.abort("enough")
        else:
            with pytest.raises(fo.CommunicationError, match=r"rank 0.*enough"):
                comm.barrier()

    fo.run_ranks(2, on_rank)


@pytest.mark.parametrize(
    ("world_size", "options", "message"),
    [
        (0, {}, "world size"),
        (2, {"bandwidth_gbps": -1}, "bandwidth"),
        (2, {"latency_us": float("nan")}, "latency"),
        (2, {"timeout": -1}, "timeout"),
    ],
)
def test_wrong_options(world_size, options, message):
    with pytest.raises(ValueError, match=message):
        fo.run_ranks(world_size, lambda comm: None, **options)


def test_wrong_function():
    with pytest.raises(ValueError, match="function is 3; expected something to call"):
        fo.run_ranks(2, 3)


def test_two_threads_of_one_rank_are_refused():
    entered = threading.Event()

    def on_rank(comm):
        a, b = np.ones((8, 4), np.float32), np.ones((8, 4), np.float32)
        operator = fo.GemmAllReduce(comm, m=8, n=8, k=4)
        if comm.rank == 1:
            assert entered.wait(60)  # Rank 0's call waits for this one.
            return operator(a, b)
        thread = threading.Thread(target=operator, args=(a, b))
        thread.start()
        refused = None
        for _ in range(20_000):
            try:
                comm.use_tuner()  # Needs the context for a moment, and no other rank.
            except fo.BadArgumentError as error:
                refused = str(error)
                break
            time.sleep(0.001)
        entered.set()
        thread.join()
        assert refused is not None
        return refused

    assert "rank 0: another thread is in a call of this communicator" in fo.run_ranks(2, on_rank)[0]


def test_alone_from_environment():
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OMPI_", "PMI_", "SLURM_", "FLASHOVERLAP_"))
        and name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    script = "import flashoverlap as fo; print(fo.Communicator.from_environment())"
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout.strip()) == (0, "<flashoverlap.Communicator in-process: rank 0 of 1>")
    environment["RANK"], environment["WORLD_SIZE"] = "x", "2"
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert "BadArgumentError" in done.stderr
    assert "RANK" in done.stderr


MPI_PROGRAM = """
    import numpy as np, flashoverlap as fo
    comm = fo.Communicator.from_environment(num_threads=1)
    a = np.full((32, 8), comm.rank + 1, np.float32)
    b = np.ones((16, 8), np.float32)
    out = fo.gemm_all_reduce(a, b, comm=comm)
    assert comm.name == "mpi" and comm.size == 2 and (out == 8 * 3).all(), (comm, out)
    part = fo.gemm_reduce_scatter(a, b, comm=comm)
    assert part.shape == (16, 16) and (part == 8 * 3).all()
    try:
        fo.gemm_all_reduce(a, b[:, : 8 - comm.rank], comm=comm)
    except fo.Error as error:
        print(f"rank {comm.rank}: {type(error).__name__}: {error}", flush=True)
    comm.barrier()
    print("done", flush=True)
"""


def test_processes_of_mpirun():
    from flashoverlap import _core

    if not _core.mpi_library_name() or shutil.which("mpirun") is None:
        pytest.skip("built without MPI, or no mpirun")
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, "-c"]
    done = subprocess.run(
        [*command, textwrap.dedent(MPI_PROGRAM)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == 2
    assert "rank 0: CommunicationError: rank 1 cannot take part in gemm-all-reduce: BadArgumentError" in done.stdout
    assert "rank 1: BadArgumentError: a has shape [32, 8] and b [16, 7]" in done.stdout


def test_keyboard_interrupt_ends_the_ranks():
    program = """
        import time
        import flashoverlap as fo
        def on_rank(comm):
            print("waits", flush=True)
            comm.barrier() if comm.rank == 0 else time.sleep(2)
        fo.run_ranks(2, on_rank, timeout=300)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.readline()
    process.stdout.readline()
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert "KeyboardInterrupt" in errors
    assert process.returncode != 0
