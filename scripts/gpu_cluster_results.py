"""What came of the steps of gpu_cluster_bench.py: one table, one verdict on the targets, one machine profile."""

import json
import os
from pathlib import Path

OPERATORS = {
    "ar": "GEMM + all-reduce",
    "rs": "GEMM + reduce-scatter",
    "a2a": "GEMM + all-to-all",
    "ag": "all-gather + GEMM",
}
# The targets: least speed-up over serial, by operator, for the shapes that they are set for.
TARGETS = [
    ("ag", "m >= 4096", lambda c: c["m"] >= 4096, 1.30),
    ("rs", "all", lambda c: True, 1.20),
    ("ar", "k per rank 1024", lambda c: c["k"] == 1024, 1.20),
    ("ar", "k per rank 3584", lambda c: c["k"] == 3584, 1.50),
]
NEVER_BELOW = 0.98
SHARE_OF_BOUND = 0.80
PREDICTION_ERROR = 0.034


def write_json(path, value):
    """Whole or not at all, so that a call that is cut off leaves nothing that looks done."""
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(temporary, path)


def json_lines(path):
    """Objects of a file with one a line; a last line that was cut off is left out."""
    values = []
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return values
    for line in lines:
        try:
            values.append(json.loads(line))
        except ValueError:
            continue
    return values


def merge_profiles(profiles):
    """One machine profile of those that were measured for each world size. They describe the same machine; the
    first says what it is, the curves are put one after the other."""
    merged = None
    for profile in profiles:
        if merged is None:
            merged = json.loads(json.dumps(profile))
            continue
        for field in ("schema", "units"):
            if merged[field] != profile[field]:
                raise ValueError(
                    f"profiles differ in {field}: {merged[field]} and {profile[field]}; they are not of one machine"
                )
        if merged["provenance"]["device"] != profile["provenance"]["device"]:
            raise ValueError(
                f"profiles of {merged['provenance']['device']} and {profile['provenance']['device']} cannot be merged"
            )
        known = {curve_key(curve) for curve in merged.get("curves", [])}
        for curve in profile.get("curves", []):
            if curve_key(curve) not in known:
                merged.setdefault("curves", []).append(curve)
        sources = merged["provenance"].setdefault("sources", [])
        sources += [s for s in profile["provenance"].get("sources", []) if s not in sources]
    return merged


def curve_key(curve):
    return (curve["collective"], curve["world_size"], curve["units"], curve.get("dtype", ""))


def case_figures(case):
    """Derived numbers of one measured case. bound: what no overlap can beat, serial without the shorter of GEMM
    and communication."""
    bound_us = case["serial_us"] - min(case["cublas_us"], case["communication_us"])
    speedup = case["serial_us"] / case["overlapped_us"]
    best = case["serial_us"] / bound_us if bound_us > 0 else float("inf")
    figures = {"bound_us": bound_us, "speedup": speedup, "share": speedup / best}
    if case.get("predicted_us"):
        figures["prediction_error"] = abs(case["predicted_us"] - case["overlapped_us"]) / case["overlapped_us"]
    return figures


def render_table(cases):
    head = (
        "| ranks | operator | m x n x k per rank | cuBLAS | NCCL | serial | overlapped | speed-up | bound | share of bound "
        "| method | predicted | error % | library default | wrong |\n"
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|\n"
    )
    order = {name: i for i, name in enumerate(OPERATORS)}
    rows = []
    for case in sorted(cases, key=lambda c: (c["ranks"], order.get(c["op"], 99), c["m"], c["n"], c["k"])):
        figures = case_figures(case)
        predicted = f"{case['predicted_us']:.0f}" if case.get("predicted_us") else "-"
        error = f"{100 * figures['prediction_error']:.1f}" if "prediction_error" in figures else "-"
        rows.append(
            f"| {case['ranks']} | {OPERATORS.get(case['op'], case['op'])} | {case['m']}x{case['n']}x{case['k']} "
            f"| {case['cublas_us']:.0f} | {case['communication_us']:.0f} | {case['serial_us']:.0f} "
            f"| {case['overlapped_us']:.0f} | {figures['speedup']:.3f} | {figures['bound_us']:.0f} "
            f"| {figures['share']:.2f} | {case['method']} | {predicted} | {error} | {case['default_us']:.0f} "
            f"| {case['wrong']} |"
        )
    return head + "\n".join(rows) + ("\n" if rows else "")


def median(values):
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def judge(cases):
    """The targets against the cases there are: (what, target, measured, verdict)."""
    rows = []
    for operator, where, applies, least in TARGETS:
        values = [case_figures(c)["speedup"] for c in cases if c["op"] == operator and applies(c)]
        rows.append(verdict(f"{OPERATORS[operator]}, {where}: speed-up, median", f">= {least:.2f}", values, least))
    speedups = [case_figures(c)["speedup"] for c in cases]
    rows.append(verdict("any case: speed-up, worst", f">= {NEVER_BELOW}", speedups, NEVER_BELOW, pick=min))
    shares = [case_figures(c)["share"] for c in cases]
    rows.append(verdict("share of the bound, median", f">= {SHARE_OF_BOUND}", shares, SHARE_OF_BOUND))
    errors = [f["prediction_error"] for f in map(case_figures, cases) if "prediction_error" in f]
    row = verdict("prediction error, mean", f"<= {PREDICTION_ERROR}", errors, None, pick=lambda v: sum(v) / len(v))
    if errors:
        row = row[:3] + ("met" if sum(errors) / len(errors) <= PREDICTION_ERROR else "missed",)
    rows.append(row)
    rows.append(("MoE layer: speed-up", ">= 1.73", "-", "not on GPUs yet"))
    return rows


def verdict(what, target, values, least, pick=median):
    if not values:
        return (what, target, "-", "not measured")
    value = pick(values)
    return (what, target, f"{value:.3f} of {len(values)}", "" if least is None else ("met" if value >= least else "missed"))


def summarise(runner, steps, options):
    """summary.json, summary.md and profile.json from what lies in the step folders."""
    records = [runner.record(step) or {"step": step.name, "status": "not run", "detail": ""} for step in steps]
    cases = []
    for step in steps:
        if step.name.startswith("table-"):
            cases += json_lines(runner.folder(step) / "results.jsonl")
    profiles = []
    for step in steps:
        path = runner.folder(step) / "profile.json"
        if step.name.startswith("curves-") and runner.is_done(step) and path.exists():
            profiles.append(json.loads(path.read_text()))
    merged = merge_profiles(profiles)
    if merged is not None:
        write_json(runner.out / "profile.json", merged)
    rows = judge(cases)
    summary = {
        "rehearsal": bool(options.rehearse),
        "steps": records,
        "cases": [{**case, **case_figures(case)} for case in cases],
        "targets": [dict(zip(("what", "target", "measured", "verdict"), row)) for row in rows],
    }
    write_json(runner.out / "summary.json", summary)
    (runner.out / "summary.md").write_text(summary_text(runner, records, cases, rows, options))
    return summary


def summary_text(runner, records, cases, rows, options):
    text = "# GPU cluster benchmark" + (" (a rehearsal: one GPU stands for all ranks)" if options.rehearse else "")
    text += f"\n\n    {' '.join(options.command)}\n\n## Steps\n| step | status | s | |\n|---|---|---|---|\n"
    for record in records:
        seconds = f"{record['seconds']:.1f}" if "seconds" in record else ""
        text += f"| {record['step']} | {record['status']} | {seconds} | {record.get('detail', '')} |\n"
    text += (
        "\n## Operators\nbf16; us, the slowest rank, medians of batches, serial and overlapped in turn in one run. "
        "cuBLAS and NCCL: the parts of serial, alone. Bound: serial without the shorter of them. Predicted: of the "
        "chosen method, from the GEMM alone and the collective's curve.\n\n"
    )
    text += render_table(cases)
    text += "\n## Targets\n| what | target | measured | |\n|---|---|---|---|\n"
    text += "".join(f"| {' | '.join(row)} |\n" for row in rows)
    for name in ("topology/log.txt", "devices/log.txt"):
        path = runner.out / name
        if path.exists():
            text += f"\n## {name}\n```\n{path.read_text(errors='replace').strip()}\n```\n"
    return text
