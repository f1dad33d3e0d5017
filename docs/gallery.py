"""Draw the pictures of docs/gallery.md that need no cluster.

PYTHONPATH=. python docs/gallery.py [NAME...]        (needs the extras plot and test, and Chromium for `page`)
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from elastic_ray.batch.scaling_rules import AdaScale, Linear, ScalingRule, Sqrt
from placement.goodput.model import GoodputModel, NoiseScale
from placement.goodput.step_time import ThroughputModel
from tests.observe.page.pages import chromium, dashboard

DOCS = Path(__file__).parent
STEP_TIME = ThroughputModel(0.02, 0.001, 0.03, 0.001, 0.01, 0.0005, 2.0)
WORKERS = range(1, 33)


def goodput() -> None:
    """Draw goodput over workers, at three noise scales."""
    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for scale in (10, 100, 1000):
        model = GoodputModel(STEP_TIME, NoiseScale(sqr=1.0, var=float(scale)), 128)
        limits = {"max_batch_size": 8192, "atomic_bsz_range": (16, 512), "accumulation": True}
        best = [model.best(-(-n // 4), n, **limits)[0] for n in WORKERS]  # type: ignore[arg-type]
        axes.plot(WORKERS, [each / best[0] for each in best], label=f"noise scale {scale}")
    axes.plot(WORKERS, WORKERS, color="gray", linestyle=":", label="ideal")
    axes.set(xlabel="workers, 4 a node", ylabel="goodput / that of one worker")
    axes.legend()
    figure.savefig(DOCS / "goodput.png", dpi=110)


def rates() -> None:
    """Draw the factor of the learning rate over the batch, by rule."""
    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    scales = [2 ** (n / 8) for n in range(49)]
    rules: list[tuple[str, ScalingRule, float]] = [("linear", Linear(), 1), ("square root", Sqrt(), 1)]
    rules += [(f"AdaScale, var / sqr = {var:g}", AdaScale(), var) for var in (4.0, 32.0)]
    for name, rule, var in rules:
        noise = [NoiseScale(sqr=1.0, var=var)]
        axes.plot(scales, [rule.factors(scale, noise, 10.0)[0] for scale in scales], label=name)
    axes.set(xlabel="batch / initial batch", ylabel="factor of the learning rate", xscale="log", yscale="log")
    axes.legend()
    figure.savefig(DOCS / "rates.png", dpi=110)


def simulated() -> None:
    """Draw the allocation of the simulator's demo under two policies."""
    options = ("--demo", "--policy", "fair_share,goodput", "--quiet", "--plot", str(DOCS / "simulated.png"))
    subprocess.run([sys.executable, "-m", "placement.simulator", *options], check=True)


def page() -> None:
    """Take a picture of the page that shows a simulation, in a dark window."""
    with tempfile.TemporaryDirectory() as folder:
        report = f"{folder}/report.json"
        options = ("--demo", "--policy", "goodput", "--quiet", "--json", report)
        subprocess.run([sys.executable, "-m", "placement.simulator", *options], check=True)
        with dashboard("--simulation", report) as (address, _), chromium() as browser:
            tab = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="dark")
            tab.goto(address)
            tab.wait_for_timeout(3000)  # until lanes and lines are drawn
            tab.screenshot(path=DOCS / "page.png")


PICTURES = {"goodput": goodput, "rates": rates, "simulated": simulated, "page": page}

if __name__ == "__main__":
    for wanted in sys.argv[1:] or PICTURES:
        PICTURES[wanted]()
