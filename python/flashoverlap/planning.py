"""Calls on paper: their plans, what they would take on a machine, and which plan is the best there."""

from __future__ import annotations

import contextlib
import json
import platform
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from . import _arrays, _core
from ._problem import GROUPS, SLICES, operation_name, problem_of
from .errors import BadArgumentError

Timeline = _core.Timeline


class Plan:
    """An overlap plan of one rank: which tile when, which tiles travel together, where the data goes.

    ``print(plan)`` shows the tile map; ``plan.to_dict()`` has every field (docs/plan-format.md); ``plan.plot()``
    draws the tile map with matplotlib.
    """

    def __init__(self, text: str) -> None:
        self._json = text
        self._dict: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        if self._dict is None:
            self._dict = json.loads(self._json)
        return self._dict

    @staticmethod
    def from_dict(fields: dict[str, Any]) -> Plan:
        """Raises BadArgumentError, naming the field, for a plan that does not hold."""
        text = json.dumps(fields)
        _core.plan_text(text)  # Reads and verifies it.
        return Plan(text)

    @property
    def operation(self) -> str:
        return str(self.to_dict()["operation"])

    @property
    def rank(self) -> int:
        return int(self.to_dict()["rank"])

    @property
    def world_size(self) -> int:
        return int(self.to_dict()["world_size"])

    @property
    def num_waves(self) -> int:
        return sum(self.partition)

    @property
    def partition(self) -> list[int]:
        """Waves of each group."""
        plan = self.to_dict()
        units = plan["resources"]["compute_units"]
        return [-(-group["num_tiles"] // units) for group in plan["groups"]]

    @property
    def num_tiles(self) -> int:
        return len(self.to_dict()["schedule"])

    def plot(self, axes: Any = None) -> Any:
        from .plotting import plot_plan

        return plot_plan(self, axes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash(self._json)

    def __str__(self) -> str:
        return _core.plan_text(self._json)

    def __repr__(self) -> str:
        return (
            f"<flashoverlap.Plan {self.operation}, rank {self.rank} of {self.world_size}, {self.num_tiles} tiles, "
            f"{len(self.to_dict()['groups'])} groups>"
        )


class MachineProfile:
    """What is known of a machine: how long GEMMs and transfers take there (docs/machine-profile.md)."""

    def __init__(self, text: str) -> None:
        self._json = text

    @staticmethod
    def load(name_or_path: str) -> MachineProfile:
        """A profile that ships (``machine_profiles()``) or a file of ``flashoverlap profile``."""
        return MachineProfile(_core.load_machine_profile(str(name_or_path)))

    @staticmethod
    def from_dict(fields: dict[str, Any]) -> MachineProfile:
        return MachineProfile(_core.parse_machine_profile(json.dumps(fields)))

    def to_dict(self) -> dict[str, Any]:
        fields: dict[str, Any] = json.loads(self._json)
        return fields

    @property
    def name(self) -> str:
        return str(self.to_dict()["name"])

    def transfer_us(
        self, operation: str, world_size: int, sizes: Sequence[int], *, units: int = 0, dtype: Any = "float32"
    ) -> list[float]:
        """How long one transfer of each size (bytes of a rank's whole buffer) takes."""
        return _core.curve_points(
            self._json,
            operation_name(operation),
            world_size,
            units,
            _arrays.dtype_name(dtype),
            [int(s) for s in sizes],
        )

    def communication_units(self, operation: str, world_size: int) -> list[int]:
        """Numbers of communication units for which there are measured curves; [0]: none."""
        return _core.communication_unit_choices(self._json, operation_name(operation), world_size)

    def plot(self, operation: str, world_size: int, axes: Any = None) -> Any:
        from .plotting import plot_bandwidth

        return plot_bandwidth(self, operation, world_size, axes)

    def __repr__(self) -> str:
        return f"<flashoverlap.MachineProfile {self.name}>"


def machine_profiles() -> list[str]:
    """Names of the profiles that ship with the library."""
    return _core.shipped_machine_profiles()


def profile_of(machine: Any) -> MachineProfile:
    if isinstance(machine, MachineProfile):
        return machine
    if isinstance(machine, dict):
        return MachineProfile.from_dict(machine)
    if isinstance(machine, (str, Path)):
        return MachineProfile.load(str(machine))
    raise BadArgumentError(
        f"machine is {machine!r}; expected a MachineProfile, a dict, a file, or one of {', '.join(machine_profiles())}"
    )


@contextlib.contextmanager
def profile_file(machine: Any) -> Iterator[str | None]:
    """The machine as a file, for the compiled half; None stays None."""
    if machine is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "machine.json"
        path.write_text(profile_of(machine)._json, encoding="utf-8")
        yield str(path)


def cpu_name() -> str:
    """As the command writes it into tuning caches: model and cores."""
    from os import cpu_count

    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return f"{model}, {cpu_count()} cores"


def plan(operation: str, **problem: Any) -> list[Plan]:
    """The plans of all ranks, verified together, as the operators make them; nothing is computed.

    operation: that of a function: "gemm_all_reduce", "gemm_reduce_scatter", "gemm_all_to_all", "all_gather_gemm",
    "sharded_weight_gemm", "gradient_reduce_scatter", "gemm_all_to_all_heads", "all_to_all_gemm".
    problem: m, n, k as the operator's class has them; world_size=2; dtype="float32"; tile=None; units=0 (compute units
    of a rank; 0: this machine's); method="auto", also "serial", and of the class "sliced", "signal", "tail-free".
    Wave groups: partition="auto"; rows="contiguous" (reduce-scatter); destinations (all-to-all: one list per rank).
    Slices: rows and columns (heads) of each rank; parts=0; send_channels=0; num_slices=0.
    """
    return [Plan(text) for text in _core.make_plans(problem_of(operation, whole=True, **problem))]


def verify(plans: Sequence[Plan]) -> str:
    """Why these plans of all ranks do not hold together; empty when they do."""
    return _core.verify_plans([plan._json for plan in plans])


@dataclass(frozen=True)
class Choice:
    """One way to carry a call out, and what the papers' closed form says it takes. Times in microseconds."""

    tile: tuple[int, int]
    swizzle: int
    compute_units: int
    communication_units: int
    partition: list[int]
    total_us: float
    compute_us: float
    communication_us: float
    exposed_us: float
    lower_bound_us: float
    groups: list[dict[str, Any]] = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"{self.total_us:.1f} us predicted: {self.compute_us:.1f} us computing, {self.exposed_us:.1f} us exposed "
            f"(communication {self.communication_us:.1f} us); tile {self.tile[0]}x{self.tile[1]}, "
            f"{self.compute_units} + {self.communication_units} units, groups {','.join(map(str, self.partition))}"
        )


@dataclass(frozen=True)
class Tuning:
    """What ``tune`` found: ``best`` is never predicted slower than ``serial``, the best without overlap."""

    best: Choice
    serial: Choice
    candidates: list[Choice] = field(repr=False)
    num_priced: int
    explanation: str = field(repr=False)

    @property
    def speedup(self) -> float:
        return self.serial.total_us / self.best.total_us if self.best.total_us > 0 else 1.0

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "speedup": self.speedup}

    def __str__(self) -> str:
        return self.explanation.rstrip()


def tune(operation: str, *, machine: Any, **problem: Any) -> Tuning:
    """Searches tile, units and partition together, by prediction (docs/tuning.md). Arguments: see ``plan``.

    For operators with wave groups; for those with slices see ``choose_parts``.
    machine: a MachineProfile, a dict of one, a file, or the name of one that ships. units=0: the machine's.
    """
    asked = problem_of(operation, **problem)
    if asked.operation not in GROUPS or asked.method == "tail-free":
        raise BadArgumentError(
            f"{asked.operation} travels in slices, of which there is no closed form: there are choose_parts and "
            f"simulate; expected {', '.join(GROUPS)} by wave groups"
        )
    found = _core.tune(asked, profile_of(machine)._json)
    return Tuning(
        Choice(**found["best"]),
        Choice(**found["serial"]),
        [Choice(**one) for one in found["candidates"]],
        found["num_priced"],
        found["explanation"],
    )


@dataclass(frozen=True)
class PartsChoice:
    """How slices should travel. candidates: parts and send_channels that were simulated, with their time in us."""

    parts: int
    send_channels: int
    candidates: list[tuple[int, int, float]]
    reason: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return self.reason


def choose_parts(operation: str, *, machine: Any, **problem: Any) -> PartsChoice:
    """``parts`` and ``send_channels`` with which an operator with slices is quickest on ``machine``, simulated
    (docs/tail-free.md).

    Arguments: see ``tune``; "gemm_reduce_scatter" with method="tail-free". 0 among the candidates: as few parts as
    leave no tail where communication takes no longer than computation, and the operator's own send_channels.
    ``Communicator.use_tuner`` does the same for operators whose parts are left open.
    """
    asked = problem_of(operation, **problem)
    if asked.operation in GROUPS and asked.method != "tail-free":
        raise BadArgumentError(f"{asked.operation} has wave groups, not slices; expected one of {', '.join(SLICES)}")
    return PartsChoice(**_core.choose_parts(asked, profile_of(machine)._json))


def predict(operation: str, *, machine: Any, **problem: Any) -> Choice:
    """What a call takes on ``machine``, by the closed form. With partition="auto": the tuner's best."""
    return tune(operation, machine=machine, **problem).best


@dataclass(frozen=True)
class Simulation:
    """A simulated call. ``serial_us`` is the same call without overlap, simulated too.

    choice: of the tuner, for operators with wave groups; None for those with slices. sliced_us: those with slices, by
    their baseline in ``num_slices`` slices, where that was asked for.
    """

    total_us: float
    serial_us: float
    sliced_us: float | None
    choice: Choice | None
    ranks: list[dict[str, Any]] = field(repr=False)
    critical_path: list[str] = field(repr=False)
    num_events: int
    timeline: Timeline = field(repr=False, compare=False)

    @property
    def speedup(self) -> float:
        return self.serial_us / self.total_us if self.total_us > 0 else 1.0

    @property
    def exposed_us(self) -> float:
        """What communication adds on the rank where it adds most."""
        return float(max(rank["exposed_communication_us"] for rank in self.ranks))

    def to_dict(self) -> dict[str, Any]:
        return {
            "total_us": self.total_us,
            "serial_us": self.serial_us,
            "sliced_us": self.sliced_us,
            "speedup": self.speedup,
            "exposed_us": self.exposed_us,
            "choice": self.choice.to_dict() if self.choice else None,
            "ranks": self.ranks,
            "critical_path": self.critical_path,
            "num_events": self.num_events,
            "spans": self.timeline.spans,
        }

    def plot(self, axes: Any = None) -> Any:
        from .plotting import plot_timeline

        return plot_timeline(self.timeline, axes)

    def __str__(self) -> str:
        lines = [
            f"{self.total_us:.1f} us simulated, {self.serial_us:.1f} us without overlap: {self.speedup:.3f}x",
            *([f"predicted: {self.choice}"] if self.choice else [f"{self.exposed_us:.1f} us of communication exposed"]),
            *([f"{self.sliced_us:.1f} us by the baseline in slices"] if self.sliced_us is not None else []),
            "What the time consists of, the end first:",
            *(f"  {link}" for link in self.critical_path),
        ]
        return "\n".join(lines)


def simulate(
    operation: str,
    *,
    machine: Any,
    jitter: float = 0.0,
    seed: int = 1,
    slow_ranks: dict[int, float] | None = None,
    timeline_ranks: int = 2,
    **problem: Any,
) -> Simulation:
    """Runs the plans of all ranks on a machine that need not be there, event by event. Arguments: see ``plan``.

    machine: see ``tune``, which chooses what wave groups leave open. Of operators with slices the tile is the machine's
    first of this dtype; "gemm_reduce_scatter" is one with method="tail-free". num_slices: simulates that baseline too.
    jitter: relative standard deviation of tile and transfer times. slow_ranks: rank to the factor that its tiles take
    longer. timeline_ranks: how many ranks go into the timeline.
    """
    if seed < 0:
        raise BadArgumentError(f"seed is {seed}; expected an integer >= 0")
    found = _core.simulate(
        problem_of(operation, **problem),
        profile_of(machine)._json,
        float(jitter),
        seed,
        [(int(rank), float(factor)) for rank, factor in (slow_ranks or {}).items()],
        timeline_ranks,
    )
    overlap, choice = found["overlap"], found["choice"]
    return Simulation(
        overlap["total_us"],
        found["serial_us"],
        found["sliced_us"],
        None if choice is None else Choice(**choice),
        overlap["ranks"],
        overlap["critical_path"],
        overlap["num_events"],
        found["timeline"],
    )
