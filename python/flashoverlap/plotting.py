"""Pictures of plans, timelines and bandwidth curves. Needs matplotlib (``pip install flashoverlap[plot]``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import UnsupportedError

if TYPE_CHECKING:
    from ._core import Timeline
    from .planning import MachineProfile, Plan

_COLOURS = {"compute": "#4c78a8", "communication": "#f58518", "wait": "#d9d9d9", "epilogue": "#54a24b"}


def _axes(axes: Any, size: tuple[float, float]) -> Any:
    if axes is not None:
        return axes
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedError("plots need matplotlib: pip install matplotlib") from error
    # Without pyplot: no window, no global state; figure.savefig works everywhere.
    return Figure(figsize=size, layout="constrained").add_subplot()


def plot_plan(plan: Plan, axes: Any = None) -> Any:
    """The output's tiles, coloured by wave group, each with its wave. Returns the axes."""
    import matplotlib
    from matplotlib.patches import Rectangle

    axes = _axes(axes, (8, 6))
    fields = plan.to_dict()
    units = fields["resources"]["compute_units"]
    colours = matplotlib.colormaps["tab20"]
    position_of = {tile: position for position, tile in enumerate(fields["schedule"])}
    tiles = _tiles(fields["grid"])
    for index, (row, rows, col, cols) in enumerate(tiles):
        position = position_of[index]
        group = next(
            number
            for number, group in enumerate(fields["groups"])
            if group["first_position"] <= position < group["first_position"] + group["num_tiles"]
        )
        axes.add_patch(Rectangle((col, row), cols, rows, facecolor=colours(group % 20), edgecolor="white"))
        if len(tiles) <= 400:
            axes.text(col + cols / 2, row + rows / 2, str(position // units), ha="center", va="center", fontsize=7)
    axes.set_xlim(0, max((col + cols for _, _, col, cols in tiles), default=1))
    axes.set_ylim(max((row + rows for row, rows, _, _ in tiles), default=1), 0)
    axes.set_xlabel("column")
    axes.set_ylabel("row")
    axes.set_title(f"{plan.operation}: waves (numbers) and groups (colours), rank {plan.rank} of {plan.world_size}")
    return axes


def _tiles(grid: dict[str, Any]) -> list[tuple[int, int, int, int]]:
    """(row, rows, column, columns) of each tile, in the plan's numbering: by problem, then row-major."""
    tiles = []
    for problem in grid["problems"]:
        for row in range(0, problem["rows"], grid["tile_m"]):
            for col in range(0, problem["cols"], grid["tile_n"]):
                tiles.append(
                    (
                        problem["row_begin"] + row,
                        min(grid["tile_m"], problem["rows"] - row),
                        problem["col_begin"] + col,
                        min(grid["tile_n"], problem["cols"] - col),
                    )
                )
    return tiles


def plot_timeline(timeline: Timeline, axes: Any = None) -> Any:
    """What ran where and when, one line per rank and track. Returns the axes."""
    axes = _axes(axes, (10, 4))
    spans = timeline.spans
    tracks = list(dict.fromkeys((span["rank"], span["track"]) for span in spans))
    begin = min((span["begin_us"] for span in spans), default=0.0)
    for kind, colour in _COLOURS.items():
        for line, track in enumerate(tracks):
            bars = [
                (span["begin_us"] - begin, span["end_us"] - span["begin_us"])
                for span in spans
                if span["kind"] == kind and (span["rank"], span["track"]) == track
            ]
            axes.broken_barh(bars, (line - 0.4, 0.8), facecolors=colour, label=kind if line == 0 else None)
    axes.set_yticks(range(len(tracks)), [f"rank {rank}, {track}" for rank, track in tracks])
    axes.invert_yaxis()
    axes.set_xlabel("time [us]")
    axes.legend(loc="upper right", fontsize=8)
    return axes


def plot_bandwidth(machine: MachineProfile, operation: str, world_size: int, axes: Any = None) -> Any:
    """Bytes / time against size, one curve for each number of communication units. Returns the axes."""
    axes = _axes(axes, (7, 4))
    sizes = [2**power for power in range(10, 31)]
    for units in machine.communication_units(operation, world_size):
        times = machine.transfer_us(operation, world_size, sizes, units=units)
        rates = [size / time / 1e3 for size, time in zip(sizes, times, strict=False)]
        axes.plot(sizes, rates, label=f"{units} communication units" if units else "any units")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("bytes of the whole buffer")
    axes.set_ylabel("1e9 bytes/s (size / time)")
    axes.set_title(f"{machine.name}: {operation}, {world_size} ranks")
    axes.legend(fontsize=8)
    return axes
