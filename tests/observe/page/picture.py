"""The picture of the page in the docs: ``python -m tests.observe.page.picture`` trains two jobs here, and looks.

``--all FOLDER`` writes the page at the widths of a phone, a laptop and a large screen, light and dark, to be looked at.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.local_cluster import LocalCluster, clean_up  # first: it sets what Ray and torch read
from tests.observe.page.pages import chromium, dashboard, tab, until

PICTURE = Path(__file__).parents[3] / "docs" / "dashboard.png"
WIDTHS = {390: 844, 1280: 900, 1920: 1080}
TRAINS_S = 40.0
_TEXT = "(document.getElementById('printed-{0}')?.textContent ?? '').includes('{1}')"


def train(config: dict[str, Any]) -> None:
    """Train a small net on points of ten classes, slowly enough to be looked at."""
    import torch

    import elastic_ray as er

    chance = torch.Generator().manual_seed(0)
    x = torch.randn(4096, 32, generator=chance)
    y = (x @ torch.randn(32, 10, generator=chance)).argmax(1)
    model = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    parallel = er.AdaptiveDataParallel(model, optimizer)
    data = torch.utils.data.TensorDataset(x, y)
    loader = er.AdaptiveDataLoader(data, batch_size=64, shuffle=True)
    loader.autoscale_batch_size(256, local_bsz_bounds=(16, 128))
    for epoch in er.remaining_epochs_until(1000):
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(parallel(inputs), labels)
            loss.backward()
            optimizer.step()
            time.sleep(0.02)  # a step as long as a small model's on a GPU, so that two cores hold six workers
        with torch.no_grad():
            accuracy = float((model(x).argmax(1) == y).float().mean())
        er.report({"loss": loss.item(), "accuracy": accuracy})
        print(f"epoch {epoch}: loss {loss.item():.3f}, accuracy {accuracy:.3f}", flush=True)


def submit(folder: Path, name: str, lr: float, workers: tuple[int, int]) -> Any:
    """Submit one of the jobs."""
    import ray.train

    import elastic_ray as er

    return er.ElasticTrainer(
        train,
        train_loop_config={"lr": lr},
        scaling_config=ray.train.ScalingConfig(num_workers=workers),
        run_config=ray.train.RunConfig(name=name, storage_path=str(folder)),
    ).submit()


def looks(url: str, widths: dict[int, int]) -> Iterator[tuple[int, str, bytes]]:
    """The page with the first job's panel open: its output, a stack and its charts, at each width, light and dark."""
    with chromium() as started:
        for width, height in widths.items():
            for theme in ("light", "dark"):
                viewport = {"width": width, "height": height}
                with tab(started, viewport=viewport, color_scheme=theme) as (page, _):
                    page.goto(url)
                    page.locator("[data-job=resnet]").click()
                    page.locator("#detail .looks").first.wait_for()
                    page.get_by_role("button", name="logs").first.click()
                    until(page, _TEXT.format("logs", "epoch"), 30.0)
                    page.get_by_role("button", name="stack").first.click()
                    until(page, _TEXT.format("stack", "Thread"), 60.0)
                    page.wait_for_timeout(1500)
                    yield width, theme, page.screenshot(full_page=True)


def main() -> None:
    """Train, look and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", type=Path, metavar="FOLDER", help="write every width, light and dark, instead")
    folder: Path | None = parser.parse_args().all
    import tempfile

    runs = Path(tempfile.mkdtemp(prefix="picture-"))
    cluster = LocalCluster(num_cpus=4)
    try:
        with dashboard(address=cluster.address) as (url, _):  # before the jobs: its curves begin with it
            node = cluster.add_node(num_cpus=2)
            jobs = [submit(runs, "resnet", 0.1, (1, 4)), submit(runs, "whisper", 0.02, (1, 3))]
            time.sleep(TRAINS_S)  # curves need some length
            jobs[1].resize(1)
            cluster.drain_node(node)
            time.sleep(TRAINS_S / 3.0)  # with fewer slots
            cluster.remove_node(node)
            cluster.add_node(num_cpus=2)
            time.sleep(TRAINS_S / 2.0)  # with more again
            for width, theme, png in looks(url, WIDTHS if folder else {1280: 900}):
                if folder:
                    folder.mkdir(parents=True, exist_ok=True)
                    (folder / f"{width}-{theme}.png").write_bytes(png)
                elif theme == "light":
                    PICTURE.write_bytes(png)
        for job in jobs:
            job.stop()
    finally:
        cluster.shutdown()
        clean_up(failed=False)


if __name__ == "__main__":
    main()
