"""The page in a real browser, with facts of the test's own: hostile names, a thousand jobs, keys, a phone."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_ray.observe.page.model import (
    JobDetail,
    PageDecision,
    PageJob,
    PageNode,
    PageSnapshot,
    PageSource,
    SlotCount,
    Strip,
    TenantShare,
    WantedNodes,
)
from elastic_ray.observe.page.source import StoredPage
from elastic_ray.observe.page.sources.simulation import SimulatedCluster
from placement.palette import colour
from placement.simulator.cli import main
from tests.observe.page.pages import chromium, missing, served, tab, until
from tests.placement.simulator.worlds import profiles, trace

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.timeout(1000),
    pytest.mark.xdist_group("processes"),  # one browser, beside nothing that is measured
]


@pytest.fixture(scope="module")
def started() -> Iterator[Any]:
    with chromium() as found:
        yield found


HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>"


def page_of(jobs: int, bars: int = 0, **more: Any) -> PageSnapshot:
    """A cluster of eight nodes with eight slots each."""
    end_s = 7 * 86_400.0
    nodes = tuple(PageNode(node=f"n{n}", label=f"10.0.0.{n}", type="T4", slots=8, used=4, spot=n > 5) for n in range(8))
    rows = tuple(
        PageJob(
            job=HOSTILE if n == 0 else f"job-{n:04d}",
            phase="running",
            workers=2,
            target=2,
            why=f"{HOSTILE} because {n}",
            tenant=HOSTILE,
            metrics={"loss": 1.0 / (n + 1)},
            progress=n / max(jobs, 1),
            submitted_s=0.0,
            sweep="sweep" if 0 < n < 5 else "",
            rungs=(1, 4, 16) if 0 < n < 5 else (),
            reports=(0, 2, 5, 0, 16)[n] if n < 5 else 0,
            colour=colour(n),
        )
        for n in range(jobs)
    )
    stays = tuple(
        (n + 1, f"n{n % 8}", rows[n % jobs].job, end_s * n / bars, end_s * (n + 6) / bars, 2, 1) for n in range(bars)
    )
    values: dict[str, Any] = {
        "time_s": end_s,
        "source": PageSource(kind="simulation", name=HOSTILE, actions=True),
        "strip": Strip(slots=(SlotCount(type="T4", used=30, idle=34),), policy=HOSTILE, speed=3.0, speed_equal=2.0),
        "jobs": rows,
        "nodes": nodes,
        "bars": stays,
        "marks": tuple((10_000_000 + n, end_s * n / 50, rows[n % jobs].job, "resize", HOSTILE) for n in range(50)),
        "decisions": (
            PageDecision(number=1, time_s=1.0, trigger="end", job=HOSTILE, before=1, after=2, reason=HOSTILE),
        ),
        "tenants": (TenantShare(tenant=HOSTILE, weight=1.0, owed=0.5, used=0.7, lent=0.0, borrowed=0.2),),
        "wanted": (
            WantedNodes(
                type=HOSTILE,
                wanted=2,
                missing=1,
                since_s=1.0,
                jobs=(HOSTILE,),
                reason=HOSTILE,
                figures=HOSTILE,
                market="",
            ),
        ),
        **more,
    }
    return PageSnapshot(**values)


def detail(job: str) -> JobDetail:
    return JobDetail(
        job=job,
        curve=((1, 100.0), (2, 180.0), (3, 240.0)),
        measured=((1, 95.0), (2, 185.0)),
        gain=60.0,
        explanation=HOSTILE,
        series=tuple(
            (float(t), 64.0 * t, 64, 100.0, 2, 50.0, 1.4, {"loss": 1.0 / (t + 1), "eval/f1": t / 50}) for t in range(50)
        ),
        pauses=((5.0, "resize", 0.4, {"vote": 0.1, "group": 0.2, "other": 0.1}),),
        shares={"training": 90.0, "waiting": 10.0},
        workers=(
            (0, "n0", 4242, 1, 0.4, None, 3 << 30, 4 << 30),
            (1, HOSTILE, 4243, 1, 12.0, 1.6, None, None),
        ),
        events=((5.0, "resize", 1, 2, HOSTILE),),
        logs=HOSTILE,
    )


def test_hostile_names_are_shown_as_such_everywhere(started: Any) -> None:
    snapshot = page_of(3, bars=9, source=PageSource(kind="live", name=HOSTILE, actions=True))
    with served(StoredPage(snapshot, {HOSTILE: detail(HOSTILE)})) as port, tab(started) as (page, wrong):
        page.goto(f"http://127.0.0.1:{port}/")
        page.wait_for_selector(".body [data-job]")
        page.locator(".body [role=row]").first.click()
        page.wait_for_selector("[data-chart='Goodput over workers']")
        page.wait_for_timeout(300)
        assert page.locator("main script, main img").count() == 0
        for section in ("#strip", "#table", "#h-job", "#detail", "#tenant-rows", "#wanted-rows", "#decision-rows"):
            assert HOSTILE in page.locator(section).inner_text(), section
        assert HOSTILE in page.locator("#source").inner_text()
        page.fill("#what-nodes", HOSTILE)
        page.click("#question button")
        page.wait_for_selector("#what-answer .bad")
        assert "asks about jobs that run now" in page.locator("#what-answer").inner_text()
        wrong.clear()  # the browser's own line about the answer 400


def test_a_sweep_ranks_its_trials_and_names_differences(started: Any) -> None:
    def trial(number: int, rate: float, width: int, score: float | None, **more: Any) -> PageJob:
        parameters = {"net/width": width, "lr": rate, "folder": "/data"}
        given: dict[str, Any] = {"phase": "running", "parameters": parameters, "score": score, "colour": colour(number)}
        given |= {"metric": "accuracy", "mode": "max", "sweep": "digits"}
        return PageJob(job=f"digits-{number:05d}", **{**given, **more})

    jobs = (
        trial(0, 3e-4, 128, 0.7, eta_s=61.0, why="held at 2", note="held at 2"),
        trial(1, 0.1, 128, 0.91, phase="finished", ended_s=5.0),
        trial(2, 0.1, 64, None, phase="stopped", ended_s=5.0),
        trial(3, 0.1, 32, 0.2, eta_s=86_400.0 * 12 + 3600.0),
    )
    snapshot = dataclasses.replace(page_of(1), jobs=jobs, marks=(), tenants=(), wanted=())
    with served(StoredPage(snapshot, {})) as port, tab(started) as (page, _):
        page.goto(f"http://127.0.0.1:{port}/")
        page.wait_for_selector("[data-sweep] table")
        said = page.locator("[data-sweep] h3").inner_text()
        assert said.startswith("digits: 4 trials, 2 running, 1 done, 1 cut, best accuracy 0.91 at width=128 lr=0.1"), (
            said
        )
        assert said.endswith("those that run end in 12d01h")
        names = page.locator("[data-sweep] tbody td:first-child").all_inner_texts()
        assert names == ["width=128 lr=0.1", "width=128 lr=3e-4", "width=32 lr=0.1", "width=64 lr=0.1"]
        assert page.locator("#tenants").is_hidden() and page.locator("#wanted").is_hidden()
        reasons = page.locator(".body [data-column=why]").all_inner_texts()
        assert "held at 2" in reasons and "held at 2; held at 2" not in reasons
        cut = "[...document.querySelectorAll('.grid .body [data-column]:not([data-column=why])')]"
        assert page.evaluate(f"{cut}.filter((each) => each.scrollWidth > each.clientWidth).length") == 0
        edges = "(row) => [...row.children].map((each) => Math.round(each.getBoundingClientRect().left)).join()"
        head = page.locator(".grid .head").evaluate(edges)
        assert head == page.locator(".grid .body [role=row]").first.evaluate(edges), "columns stand under their heads"


def test_any_metric_is_shown_and_compared(started: Any) -> None:
    snapshot = dataclasses.replace(page_of(3), marks=(), tenants=(), wanted=())
    rows = [dataclasses.replace(j, metrics={"loss": 0.5, "eval/f1": 0.1 * n}) for n, j in enumerate(snapshot.jobs)]
    details = {each.job: detail(each.job) for each in rows[1:]}
    shown = dataclasses.replace(snapshot, jobs=tuple(rows))
    with served(StoredPage(shown, details)) as port, tab(started) as (page, wrong):
        page.goto(f"http://127.0.0.1:{port}/")
        page.wait_for_selector("[data-job='job-0002'] [data-column=metric]")
        page.click("#metrics summary")
        page.wait_for_selector("#metrics [data-chart] path[fill=none]")
        assert page.locator("[data-job='job-0002'] [data-column=metric]").inner_text() == "loss 0.5"
        page.select_option("#metric", "eval/f1")
        page.wait_for_selector("[data-chart='eval/f1 over samples, by job']")
        assert page.locator("[data-job='job-0002'] [data-column=metric]").inner_text() == "0.2"
        page.select_option("#compared", ["job-0001"])
        until(page, "document.querySelectorAll('#metrics [data-chart] .keys span').length === 1")
        page.click("[data-job='job-0001']")
        page.wait_for_selector("[data-chart='eval/f1 over samples']")
        workers = page.locator("[data-chart='Goodput over workers'] text").all_text_contents()
        assert [text for text in workers if "." in text] == [], "no halves of workers"
        wrong.clear()  # the browser's line about the first job's detail, which there is not


def test_a_node_is_shaded_while_it_lives_marks_above(started: Any) -> None:
    """A week; the node comes after a day and goes after four, and one job is marked in the middle."""
    day = 86_400.0
    life = PageNode(node="n0", label="10.0.0.0", slots=8, since_s=day, gone_s=4 * day)
    marks = ((1, 3.5 * day, HOSTILE, "resize", "grown"),)
    bars = ((1, "n0", HOSTILE, 0.0, 0.1 * day, 1, 1), (2, "n0", HOSTILE, 6.9 * day, 7 * day, 1, 1))
    snapshot = dataclasses.replace(page_of(1), nodes=(life,), bars=bars, marks=marks, tenants=(), wanted=())
    with served(StoredPage(snapshot, {})) as port, tab(started) as (page, _):
        page.goto(f"http://127.0.0.1:{port}/")
        page.wait_for_selector("body[data-ready]")
        page.wait_for_timeout(300)
        box = page.locator("#bars").bounding_box()
        left, right = 130, box["width"] - 44

        def shaded(days: float) -> bool:
            x = left + (right - left) * days / 7.0
            pixel = (
                f"getContext('2d').getImageData(Math.round({x} * devicePixelRatio), Math.round(60 * devicePixelRatio)"
            )
            return bool(page.evaluate(f"document.getElementById('bars').{pixel}, 1, 1).data[3]"))

        assert [shaded(days) for days in (0.5, 1.5, 3.5, 4.5, 6.0)] == [False, True, True, False, False]
        page.mouse.move(box["x"] + left + (right - left) * 0.5, box["y"] + 8)
        until(page, "document.getElementById('reason').textContent.endsWith('resize: grown')")
        columns = page.locator(".grid .head [role=columnheader]").all_inner_texts()
        assert "Slack" not in columns and "USD" not in columns and "Why" in columns, "empty columns are left out"
        assert page.locator("#job").is_hidden() and page.locator("nav a[href='#job']").is_hidden()


def test_decisions_nodes_and_workers_are_cards_on_a_phone(started: Any) -> None:
    snapshot = page_of(3, bars=9)
    with (
        served(StoredPage(snapshot, {"job-0001": detail("job-0001")})) as port,
        tab(started, viewport={"width": 390, "height": 844}) as (page, _),
    ):
        page.goto(f"http://127.0.0.1:{port}/")
        page.locator("[data-job=job-0001]").click()
        for rows in ("#decision-rows", "#wanted-rows", "#detail .cards"):
            page.wait_for_selector(f"{rows} td")
            wide = f"document.querySelector('{rows} .scroll')"
            assert page.evaluate(f"{wide}.scrollWidth <= {wide}.clientWidth"), f"{rows}: nothing to scroll to the side"
        assert page.evaluate("document.documentElement.scrollWidth <= 390")
        cells = "[...document.querySelectorAll('#decision-rows tr:last-child td')]"
        tops = page.evaluate(f"{cells}.map((cell) => cell.getBoundingClientRect().top)")
        assert tops == sorted(set(tops)) and len(tops) == 5, "one fact a line"


@pytest.mark.thorough
def test_one_job_shows_curve_pauses_workers_and_events(started: Any) -> None:
    with served(StoredPage(page_of(3, bars=9), {"job-0001": detail("job-0001")})) as port, tab(started) as (page, _):
        page.goto(f"http://127.0.0.1:{port}/")
        page.click("[data-job='job-0001']")
        page.wait_for_selector("[data-chart='Pauses']")
        charts = page.eval_on_selector_all("[data-chart]", "all => all.map(each => each.dataset.chart)")
        assert charts == [
            *("Goodput over workers", "Batch and noise scale", "loss over samples", "Samples/s and workers"),
            *("Pauses", "Where its time went"),
        ]
        assert page.locator("#detail details p").is_hidden(), "figures are behind a click"
        page.click("#detail summary")
        assert HOSTILE in page.locator("#detail details p").inner_text()
        text = page.locator("#detail").inner_text()
        assert "+60 samples/s" in text and "4242" in text and "resize: 0.4 s" in text
        slow = page.locator("#detail tr", has_text="4243")
        assert slow.locator(".warn").all_inner_texts() == ["12 s ago", "1.6 x"]
        assert "3 GiB of 4 GiB reserved" in text and slow.locator("button").count() == 0, "no process runs here"
        assert page.locator("[data-chart='Goodput over workers'] circle").count() == 3  # two measured, one present
        assert page.locator("[data-sweep=sweep] svg rect").count() > 0
        rungs = page.locator("[data-sweep=sweep] [data-rung]").all_text_contents()
        assert rungs == ["rung 4: 1 trial, 0 over", "rung 1: 1 trial, 0 over"]


@pytest.mark.thorough
def test_thousand_jobs_and_a_week_do_not_stall_it(started: Any) -> None:
    with served(StoredPage(page_of(1000, bars=6000), {})) as port, tab(started) as (page, _):
        page.goto(f"http://127.0.0.1:{port}/")
        page.wait_for_selector("body[data-ready]")
        assert page.locator(".body [role=row]").count() < 100
        assert "1000 jobs" in page.locator("#count").inner_text()
        page.eval_on_selector(".grid", "grid => { grid.scrollTop = grid.scrollHeight; }")
        page.wait_for_selector("[data-job='job-0999']")
        page.fill("#find", "job-0123")
        until(page, "document.getElementById('count').textContent.startsWith('1 of 1000')")
        longest_ms = page.evaluate(
            """async () => {
              const canvas = document.getElementById('bars');
              let longest = 0;
              for (let n = 0; n < 10; n += 1) {
                const begun = performance.now();
                canvas.dispatchEvent(new KeyboardEvent('keydown', {key: n % 2 ? '-' : '+'}));
                await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
                longest = Math.max(longest, performance.now() - begun);
              }
              return longest;
            }"""
        )
        assert longest_ms < 1000


@pytest.mark.thorough
def test_pointing_dragging_and_keys_work_on_the_timeline(started: Any) -> None:
    snapshot = page_of(2, bars=4, marks=())
    with (
        served(StoredPage(snapshot, {job: detail(job) for job in (HOSTILE, "job-0001")})) as port,
        tab(started) as (page, _),
    ):
        page.goto(f"http://127.0.0.1:{port}/")
        page.wait_for_selector("body[data-ready]")
        page.wait_for_timeout(200)
        box = page.locator("#bars").bounding_box()
        page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 20)
        until(page, "document.getElementById('reason').textContent.length > 10")
        assert "2 slots on 10.0.0.0" in page.locator("#reason").inner_text()
        assert HOSTILE in page.locator("#reason").inner_text()  # the decision's reason

        def picture() -> str:
            return str(page.evaluate("document.getElementById('bars').toDataURL()"))

        whole = picture()
        page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + 30)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 30, steps=3)
        page.mouse.up()
        page.mouse.move(0, 0)
        page.wait_for_timeout(200)
        assert picture() != whole, "dragging did not zoom"
        page.keyboard.press("l")
        page.keyboard.press("0")
        page.wait_for_timeout(200)
        assert picture() == whole
        page.keyboard.press("j")
        page.keyboard.press("ArrowDown")
        page.keyboard.press("ArrowDown")
        page.wait_for_selector("[data-chart='Pauses']")
        assert page.locator("#h-job").inner_text() == "Job job-0001"
        page.keyboard.press("/")
        assert page.evaluate("document.activeElement.id") == "find"


@pytest.mark.matrix(every=2)
@pytest.mark.thorough
@pytest.mark.parametrize("width, scheme", [(1280, "dark"), (390, "light")])
def test_it_fits_the_screen_in_light_and_dark(started: Any, width: int, scheme: str) -> None:
    view = {"viewport": {"width": width, "height": 800}, "color_scheme": scheme}
    with served(StoredPage(page_of(20, bars=60), {})) as port, tab(started, **view) as (page, _):
        page.goto(f"http://127.0.0.1:{port}/")
        page.wait_for_selector("body[data-ready]")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate("document.documentElement.dataset.theme") == scheme
        page.click("#theme")
        assert page.evaluate("document.documentElement.dataset.theme") != scheme


@pytest.mark.thorough
def test_a_reachable_page_shows_nothing_without_its_token(started: Any) -> None:
    with served(StoredPage(page_of(3), {}), "the-token", host="0.0.0.0") as port, tab(started) as (page, wrong):
        page.goto(f"http://127.0.0.1:{port}/")
        page.wait_for_selector("#ask[open]")
        assert "token is missing" in page.locator("#ask-why").inner_text() and not page.locator("[data-job]").count()
        page.fill("#ask-token", "another")
        page.keyboard.press("Enter")
        page.wait_for_selector("#ask[open]")
        page.fill("#ask-token", "the-token")
        page.keyboard.press("Enter")
        page.wait_for_selector("[data-job='job-0001']")
        wrong.clear()  # the browser's own lines about the answers 401
        page.goto("about:blank")
        page.goto(f"http://127.0.0.1:{port}/#token=the-token")
        page.wait_for_selector("[data-job='job-0001']")
        assert "the-token" not in page.url


@pytest.mark.thorough
def test_a_simulation_is_shown_from_its_report(started: Any, tmp_path: Path) -> None:
    report = simulated(tmp_path)
    begun = time.monotonic()
    with served(SimulatedCluster(str(report))) as port, tab(started) as (page, _):
        page.goto(f"http://127.0.0.1:{port}/")
        page.wait_for_selector("body[data-ready]")
        assert time.monotonic() - begun < 60
        assert "simulation of" in page.locator("#source").inner_text()
        assert page.locator("[data-fact='policy'] b").inner_text() == "goodput"
        assert page.locator(".body [role=row]").count() > 0


def simulated(folder: Path) -> Path:
    """A small trace under the goodput policy."""
    profiles(folder / "profiles", ("toy", "other"), ("t4",))
    trace(folder / "six.csv", [(f"j{i}", 40.0 * i, "toy" if i % 2 else "other", 1 + i % 3, 128) for i in range(6)])
    out = folder / "out.json"
    files = ["--trace", str(folder / "six.csv"), "--profiles", str(folder / "profiles"), "--json", str(out)]
    assert main([*files, "--cluster", "t4:2x4", "--rules", "live", "--processes", "1", "--quiet"]) == 0
    return out
