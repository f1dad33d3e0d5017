"""Draw the sizes of elastic jobs over time, from the events that every job keeps beside its results.

    python examples/plot_sizes.py STORAGE_PATH sizes.png          (needs `pip install -e ".[plot]"`)

``STORAGE_PATH`` is that of the jobs' ``RunConfig``; every ``events.jsonl`` below it is one job. ``JobHandle.events()``
has the same events of a job that still runs: give them to ``draw``.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import elastic_ray as er

MARKS = {
    er.events.EventKind.FAILURE: ("X", "tab:red", "worker lost"),
    er.events.EventKind.RECOVERED: ("D", "black", "controller restarted"),
    er.events.EventKind.PREEMPTED: ("v", "tab:purple", "preempted"),
}


def read(storage_path: Path) -> dict[str, list[er.events.JobEvent]]:
    """The events of every job below a folder, those of the job that began first first.

    Raises:
        FileNotFoundError: there is no ``events.jsonl`` below it.
    """
    logs = {path.parent.name: path.read_text().splitlines() for path in storage_path.rglob("events.jsonl")}
    jobs = {name: [er.events.JobEvent.from_json(line) for line in lines] for name, lines in logs.items() if lines}
    if not jobs:
        raise FileNotFoundError(f"{storage_path} must hold jobs with an events.jsonl, but there is none")
    return dict(sorted(jobs.items(), key=lambda job: job[1][0].time_s))


def draw(jobs: Mapping[str, Sequence[er.events.JobEvent]], picture: Path) -> None:
    """A row for each job: its number of workers over time, and what went wrong.

    Args:
        jobs: events by name of the job, each job's in the order of time.
        picture: file to write; its ending is the format.
    """
    from matplotlib.figure import Figure

    begin_s = min(events[0].time_s for events in jobs.values())
    most = max(event.to_workers for events in jobs.values() for event in events)
    figure = Figure(figsize=(9.0, 1.0 + 1.2 * len(jobs)), layout="constrained")
    rows = figure.subplots(len(jobs), sharex=True, sharey=True, squeeze=False)[:, 0]
    for number, (row, (name, events)) in enumerate(zip(rows, jobs.items(), strict=True)):
        times = [event.time_s - begin_s for event in events]
        sizes = [*(event.to_workers for event in events[:-1]), 0]
        row.fill_between(times, sizes, step="post", color=f"C{number}", alpha=0.35)
        row.step(times, sizes, where="post", color=f"C{number}")
        for event, at_s in zip(events, times, strict=True):
            if event.kind in MARKS:
                marker, colour, label = MARKS[event.kind]
                row.plot(at_s, event.to_workers, marker, color=colour, markersize=8, label=label, zorder=3)
        row.set(ylabel=f"{name}\nworkers", yticks=range(most + 1))
        row.spines[["top", "right"]].set_visible(False)
    rows[-1].set(xlabel="seconds since the first job began to train", xlim=0, ylim=(0, most + 0.6))
    marks = {label: mark for row in rows for mark, label in zip(*row.get_legend_handles_labels(), strict=True)}
    if marks:
        figure.legend(marks.values(), marks.keys(), loc="outside upper right", ncols=len(marks), frameon=False)
    figure.savefig(picture, dpi=110)


def main() -> None:
    """Read the command line, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("storage_path", type=Path, help="folder with the jobs' results")
    parser.add_argument("picture", type=Path, help="file to write, .png or .svg")
    options = parser.parse_args()
    draw(read(options.storage_path), options.picture)


if __name__ == "__main__":
    main()
