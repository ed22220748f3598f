"""Tables and a plot of the results that the runner left.

In Markdown, a table stands between two markers and is filled by ``python -m benchmarks table``::

    <!-- benchmark nvidia-h200-topk: case jax torch record jaxgpuops speedup -->
    <!-- end -->

The words are columns: a library, or one of COLUMNS. Before the colon may stand which rows: ``headlines``, only those
whose case says that it is one; of a sweep ``families``, one row for each, or ``worst``, the problems that are most
behind the faster of the other libraries. ``few`` are those of FEW, from the results of all families of a GPU.
"""

from __future__ import annotations

import json
import math
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MARKED = re.compile(
    r"(<!-- benchmark ([\w-]+)(?: (headlines|families|worst|few))?: ([\w ]+?) -->\n)(.*?)(<!-- end -->)", re.DOTALL
)


def _number(value: float | None, unit: str = "") -> str:
    return "–" if value is None else f"{value:.3g}{unit}" if value < 1000 else f"{value:.0f}{unit}"


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None


def _us(row, library):
    return row["us"].get(library)


def _floor(row):
    return row.get("floor", {}).get("us")


def _target(row):
    return row["target_ratio"] * _floor(row) if _floor(row) and row["target_ratio"] else None


def _of_copy(result, row):
    rate = _ratio(row["bytes"] / 1e6, _us(row, "jaxgpuops"))
    fraction = _ratio(rate, result.get("copy_rate"))
    return "–" if fraction is None else f"{fraction:.0%}"


def _worst(result, row):
    ours = "jaxgpuops, "
    times = {name.removeprefix(ours): us for name, us in row["us"].items() if name.startswith(ours)}
    times.pop("warm", None)
    if not times:
        return "–"
    worst = max(times, key=times.get)
    return f"{_number(times[worst] / _us(row, 'jaxgpuops'), '×')} {worst}"


# name -> (heading, text of a cell)
COLUMNS = {
    "case": ("", lambda result, row: row["name"].replace(" x ", " × ")),
    "jaxgpuops": ("**jaxgpuops**", lambda result, row: f"**{_number(_us(row, 'jaxgpuops'))}**"),
    "warm": ("warm", lambda result, row: _number(_us(row, "jaxgpuops, warm"))),
    "jax": ("`jax.lax`", lambda result, row: _number(_us(row, "jax"))),
    "rewritten": ("JAX, rewritten", lambda result, row: _number(_us(row, "rewritten"))),
    "loop": ("`lax.scan`", lambda result, row: _number(_us(row, "loop"))),
    "torch": ("torch", lambda result, row: _number(_us(row, "torch"))),
    "compiled": ("torch.compile", lambda result, row: _number(_us(row, "torch.compile"))),
    "triton": ("Triton", lambda result, row: _number(_us(row, "triton"))),
    "numpy": ("NumPy", lambda result, row: _number(_us(row, "numpy"))),
    "cupy": ("CuPy", lambda result, row: _number(_us(row, "cupy"))),
    "record": ("others' best*", lambda result, row: row.get("record") or "–"),
    "floor": ("floor", lambda result, row: _number(_floor(row))),
    "goal": ("target", lambda result, row: _number(row.get("goal"))),
    "target": ("target", lambda result, row: _number(_target(row))),
    "ratio": ("of floor", lambda result, row: _number(_ratio(_us(row, "jaxgpuops"), _floor(row)), "×")),
    "copy": ("of copy rate", _of_copy),
    "speedup": (
        "over `jax.lax`",
        lambda result, row: _number(_ratio(_us(row, "jax"), _us(row, "jaxgpuops")), "×"),
    ),
    "worst": ("worst rows", _worst),
    "algorithm": ("kernel", lambda result, row: " ".join(plan["algorithm"] for plan in row["plan"] if plan) or "–"),
}


# ---- Of a sweep -----------------------------------------------------------------------------------------------------

WORST = 4  # problems shown of each family


def _best(row):
    """The fastest time of the other libraries."""
    return min((us for library, us in row["us"].items() if library != "jaxgpuops"), default=math.inf)


def behind(row) -> bool:
    """Whether ours is slower than the best of the others by more than a tenth and half a microsecond."""
    return _us(row, "jaxgpuops") > 1.1 * _best(row) + 0.5


def far(row) -> bool:
    """Whether ours takes more than three times as long as the floor, and more than 20 us."""
    return _us(row, "jaxgpuops") > max(20, 3 * row["floor"])


def _mean_ratio(pairs):
    logarithms = [math.log(a / b) for a, b in pairs if a and b]
    return math.exp(sum(logarithms) / len(logarithms)) if logarithms else None


def _of_rows(about, rows):
    timed = [row for row in rows if "jaxgpuops" in row["us"]]
    return {
        "name": about,
        "problems": len(rows),
        "failed": sum("jaxgpuops" in row["errors"] for row in rows),
        "plain": sum(None in row["plan"] for row in rows),
        "behind": sum(map(behind, timed)),
        "far behind": sum(_us(row, "jaxgpuops") > 1.5 * _best(row) + 1 for row in timed),
        "over jax": _mean_ratio((_us(row, "jax"), _us(row, "jaxgpuops")) for row in timed),
        "of floor": _mean_ratio((_us(row, "jaxgpuops"), row["floor"]) for row in timed),
        "far": sum(map(far, timed)),
    }


def _families(rows):
    names = list(dict.fromkeys(row["family"] for row in rows))
    return [_of_rows(name, [row for row in rows if row["family"] == name]) for name in names] + [_of_rows("all", rows)]


def _most_behind(rows):
    chosen = []
    for family in dict.fromkeys(row["family"] for row in rows):
        losing = [row for row in rows if row["family"] == family and "jaxgpuops" in row["us"] and behind(row)]
        chosen += sorted(losing, key=lambda row: _best(row) / _us(row, "jaxgpuops"))[:WORST]
    return chosen


def _count(key):
    return lambda result, row: str(row[key])


def _problem(result, row):
    axis = f", axis {row['axis']}" if row["axis"] < len(row["shape"]) - 1 else ""
    return f"{row['call']} {' × '.join(map(str, row['shape']))} {row['dtype']}{axis}, {row['data']}"


COLUMNS |= {
    "problems": ("problems", _count("problems")),
    "failed": ("wrong", _count("failed")),
    "plain": ("left to JAX", _count("plain")),
    "behind": ("behind", _count("behind")),
    "lost": ("far behind", _count("far behind")),
    "jaxes": ("`jax.lax` ÷ ours", lambda result, row: _number(row["over jax"])),
    "floors": ("ours ÷ floor", lambda result, row: _number(row["of floor"])),
    "far": ("over 3 × floor", _count("far")),
    "problem": ("", _problem),
    "least": ("floor", lambda result, row: _number(row["floor"])),
    "kernels": ("kernel", lambda result, row: " ".join(name or "plain JAX" for name in row["plan"])),
    # columns of the results of whole programs
    "plain_jax": ("plain JAX", lambda result, row: _number(_us(row, "plain"))),
    "installed": ("after `install()`", lambda result, row: _number(_us(row, "installed"))),
    "gain": ("", lambda result, row: _number(_ratio(_us(row, "plain"), _us(row, "installed")), "×")),
    "written": ("with `jaxgpuops`", lambda result, row: _number(_us(row, "jaxgpuops"))),
}


def _moved(library):
    return lambda result, row: f"{row['moved'][library]:,}" if library in row["moved"] else "–"


def _of_link(result, row):
    rate = result["bytes_a_us"]
    return "–" if rate is None else f"{row['moved']['jaxgpuops'] / row['us']['jaxgpuops'] / rate:.0%}"


def _split_jax(result, row):
    return _number(_us(row, "jax")) + ", wrong" * ("jax" in row["wrong"])


COLUMNS |= {  # the columns of split arrays
    "split_jax": ("`jax.lax`", _split_jax),
    "jax_bytes": ("bytes", _moved("jax")),
    "bytes": ("bytes", _moved("jaxgpuops")),
    "graphs": ("in CUDA graphs", lambda result, row: _number(_us(row, "jaxgpuops, graphs"))),
    "link": ("of the link", _of_link),
    "part": ("a part alone", lambda result, row: _number(_us(row, "a part"))),
}
SWEEP_COLUMNS = "case problems failed plain behind lost jaxes floors far"
WORST_COLUMNS = "problem jaxgpuops jax torch least kernels"
PROGRAM_COLUMNS = "case plain_jax installed gain written"
SHARDED_COLUMNS = "case split_jax jax_bytes jaxgpuops bytes graphs part link"


# ---- Tables ---------------------------------------------------------------------------------------------------------


def rows_of(result: dict, which: str | None) -> list[dict]:
    if which == "headlines":
        return [row for row in result["rows"] if row.get("headline")]
    return {"families": _families, "worst": _most_behind}.get(which, list)(result["rows"])


# What a result's times are, by its "timing".
TIMES = {
    "device": "µs of device time",
    "kernels": "µs in which kernels run",
    "wall": "µs of wall time",
    "program": "µs of a whole program",
    "in flight": "µs of a run among several in flight",
}


def table(result: dict, columns: list[str], which: str | None = None) -> str:
    headings, cells = zip(*(COLUMNS[name] for name in columns), strict=True)
    rows = rows_of(result, which)
    lines = [headings, ["---"] + ["---:"] * (len(columns) - 1)]
    lines += [[cell(result, row) for cell in cells] for row in rows]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items() if name != "jaxgpuops")
    commit = result["commit"][:12] + ("-dirty" if result["commit"].endswith("-dirty") else "")
    about = f"{TIMES[result['timing']]}. {result['device']}; {versions}; commit {commit}, {result['date']}."
    before = {}  # libraries that were measured with an earlier commit
    for name, when in result.get("kept", {}).items():
        if any(name in row["us"] for row in rows):
            before.setdefault((when["commit"][:12], when["date"]), []).append(name)
    for (commit, date), names in before.items():
        about += f" {' and '.join(names)} as measured beside commit {commit}, {date}."
    return "\n".join(["| " + " | ".join(line) + " |" for line in lines] + ["", about]) + "\n"


# The results of all families that the README shows.
FEW = (
    "64 x 128256 float32, k = 50",
    "1 x 2^27 float32, k = 64",
    "cumsum 65536 x 1024 bfloat16",
    "linear_scan 8 x 2048 x 4096 float32",
    "cross-entropy and gradient 8192 x 128256 bfloat16",
)


def few_table(device: str, columns: list[str]) -> str:
    """A table with one row for each entry of FEW, from the results of all families."""
    results = [json.loads(path.read_text()) for path in sorted(RESULTS.glob(f"{device}-*.json"))]
    found = {row["name"]: (result, row) for result in results for row in result["rows"] if row.get("name") in FEW}
    headings, cells = zip(*(COLUMNS[name] for name in columns), strict=True)
    lines = [headings, ["---"] + ["---:"] * (len(columns) - 1)]
    lines += [[cell(*found[name]) for cell in cells] for name in FEW]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def fill_tables(check: bool = False) -> None:
    """Writes every marked table anew; with ``check``, only says whether one, or a plot, is out of date."""
    stale = [path.name for path in stale_plots()] if check else []
    for page in PAGES:

        def filled(match):
            marker, name, which, columns, _, end = match.groups()
            if which == "few":
                return marker + few_table(name, columns.split()) + end
            path = RESULTS / f"{name}.json"
            text = "Not measured yet.\n"
            if path.exists():
                text = table(json.loads(path.read_text()), columns.split(), which)
            return marker + text + end

        before = page.read_text()
        after = MARKED.sub(filled, before)
        if after != before:
            stale.append(page.name)
            if not check:
                page.write_text(after)
                print(f"{page.name} updated")
    if check and stale:
        sys.exit(f"out of date: {', '.join(stale)}; run python -m benchmarks table and python -m benchmarks plot")


# ---- Plots ----------------------------------------------------------------------------------------------------------


def _plots() -> dict[pathlib.Path, list[dict]]:
    """The results that each plot shows."""
    plots = {}
    for path in sorted(RESULTS.glob("*.json"), key=lambda path: ("topk" not in path.stem, path.stem)):
        result = json.loads(path.read_text())
        if result["timing"] == "device":
            plots.setdefault(RESULTS / f"{path.stem.rpartition('-')[0]}.svg", []).append(result)
    return plots


def _caption(results: list[dict]) -> str:
    commits = ", ".join(dict.fromkeys(result["commit"][:12] for result in results))
    return f"{results[0]['device']}, commit {commits}"


def stale_plots() -> list[pathlib.Path]:
    """The plots that were not drawn of the results that are there, which their captions tell."""
    return [
        path for path, results in _plots().items() if not path.exists() or _caption(results) not in path.read_text()
    ]


def plot() -> None:
    """Draws one SVG for each GPU: how near to the speed of memory each library comes, one point for each row of its
    results."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "", "font.size": 8}
    libraries = ["jaxgpuops", "jax", "torch", "torch.compile", "triton", "cupy"]
    colors = dict(zip(libraries, plt.get_cmap("tab10").colors, strict=False))
    for path, results in _plots().items():
        size = (3.2 * len(results), 3.4)
        figure, panels = plt.subplots(1, len(results), figsize=size, sharey=True, squeeze=False, layout="constrained")
        for axes, result in zip(panels[0], results, strict=True):
            for library, color in reversed(colors.items()):  # our points are drawn last, so that they lie on top
                rows = [row for row in result["rows"] if _floor(row) and library in row["us"]]
                shares = [_floor(row) / row["us"][library] for row in rows]
                axes.scatter([_floor(row) for row in rows], shares, s=10, color=color, label=library)
            axes.axhline(1, color="black", linewidth=0.8)
            axes.set(xscale="log", yscale="log", title=result["family"], xlabel="µs at the speed of memory")
            axes.grid(alpha=0.3)
        panels[0][0].set_ylabel("share of the speed of memory")
        panels[0][0].set_yticks([0.001, 0.01, 0.1, 1], ["0.1%", "1%", "10%", "100%"])
        handles, names = panels[0][0].get_legend_handles_labels()
        figure.legend(handles[::-1], names[::-1], loc="outside right center")
        figure.supxlabel(_caption(results), fontsize=7)
        figure.savefig(path, metadata={"Date": None})
        print(f"{path.name} drawn")
