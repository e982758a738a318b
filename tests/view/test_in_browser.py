"""The pages in Chromium: no console errors or external requests; keyboard shortcuts and the theme work."""

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
import uvicorn
from chromium import PROGRAM, Tab, browser_tab
from patience import wait_until
from view_runs import hold_lock, run_folder, trial_row, two_steps, write_rows

from harbortrainer.commands.view_run import site_of
from harbortrainer.view.file_export import export_run
from harbortrainer.view.run_folders import open_store
from harbortrainer.view.server import listening_socket

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="Chromium is not installed (.ci/chromium installs it)")
PAGES = ("/", "/tasks", "/trials", "/group/group1", "/trial/sort__a1", "/nowhere")


@contextmanager
def serve_pages(folder: Path) -> Generator[str]:
    """Serve a run's pages and yield the address."""
    with listening_socket(0) as listening:
        config = uvicorn.Config(site_of(folder).app(), log_level="error", lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.should_exit = True
        thread.join(30)


@pytest.fixture(scope="module")
def tab(tmp_path_factory) -> Generator[Tab]:
    with browser_tab(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def background_color(tab: Tab) -> str:
    return str(tab.run("getComputedStyle(document.body).backgroundColor"))


def test_pages_load_nothing_external_and_fit_the_window(tab, tmp_path) -> None:
    long_text = "x" * 3000
    rows = [trial_row(f"t{index}__{index}", task=long_text, error=long_text, group="group1") for index in range(3)]
    for folder in (two_steps(tmp_path / "run"), run_folder(tmp_path / "long", rows)):
        with serve_pages(folder) as address:
            tab.requests.clear()
            tab.errors.clear()
            pages = [*PAGES[:4], "/trial/t0__0" if folder.name == "long" else PAGES[4]]
            for width in (1280, 400):
                tab.emulate(width=width)
                for page in pages:
                    tab.open(address + page)
                    assert tab.run("document.documentElement.scrollWidth <= innerWidth"), (page, width)
            assert tab.errors == []
            external = [url for url in tab.requests if not url.startswith((address, "data:"))]
            assert external == [] and any(url.endswith("/style.css") for url in tab.requests)


def test_runs_are_selected_and_compared(tab, tmp_path) -> None:
    for name in ("first", "second-with-a-name-of-many-letters"):
        two_steps(tmp_path / "outputs" / name)
    tab.errors.clear()
    with serve_pages(tmp_path / "outputs") as address:
        for width in (1280, 400):
            tab.emulate(width=width)
            tab.open(address)
            assert tab.run("document.documentElement.scrollWidth <= innerWidth"), width
            inside = "((curve, panel) => curve.left >= panel.left && curve.width > 60 && curve.right <= panel.right)"
            boxes = "['.spark', '.runs'].map((one) => document.querySelector(one).getBoundingClientRect())"
            assert tab.run(f"{inside}(...{boxes})"), f"a curve is hidden or cut at {width} px"
            tab.run("document.querySelectorAll('input[type=checkbox]').forEach((one) => one.click())")
            tab.run("document.querySelector('main button').click()")
            tab.loaded()
            assert tab.run("document.querySelector('h1').innerText") == "Comparison of 2 runs"
            assert tab.run("document.documentElement.scrollWidth <= innerWidth"), width
            shown = "[...document.querySelectorAll('.chart')].filter((one) => one.checkVisibility()).length"
            assert tab.run(shown) == 2, "of the wide and the narrow chart one is shown"
        tab.open(f"{address}/run/first/trials")
        tab.press("t")
        tab.loaded()
        assert tab.run("location.pathname") == "/run/first/tasks"
    assert tab.errors == []


def test_keyboard_shortcuts_navigate(tab, tmp_path) -> None:
    tab.emulate()
    with serve_pages(two_steps(tmp_path / "run")) as address:
        tab.open(f"{address}/trials?kind=train&sort=task")
        for key in ("j", "j", "j"):
            tab.press(key)
        assert tab.run("document.querySelectorAll('tbody tr')[2].classList.contains('here')")
        href = tab.run("document.querySelector('.here').dataset.href")
        tab.press("Enter")
        tab.loaded()
        assert tab.run("location.pathname") == href
        tab.press("u")
        tab.loaded()
        assert str(tab.run("location.pathname")).startswith("/group/")
        tab.press("o")
        tab.loaded()
        assert tab.run("location.pathname") == "/"
        tab.press("?")
        assert tab.run("document.getElementById('keys').open")


def test_theme_follows_system_until_toggled(tab, tmp_path) -> None:
    with serve_pages(two_steps(tmp_path / "run")) as address:
        tab.emulate(dark=False)
        tab.open(address)
        light = background_color(tab)
        tab.emulate(dark=True)
        tab.open(address)
        dark = background_color(tab)
        assert light != dark
        tab.press("d")
        assert background_color(tab) == light
        tab.open(f"{address}/trials")
        assert background_color(tab) == light, "the choice is kept across pages"
        tab.run("localStorage.clear()")


def test_exported_file_is_self_contained(tab, tmp_path) -> None:
    file = tmp_path / "run.html"
    export_run(open_store(two_steps(tmp_path / "run")), file, trials=5)
    tab.requests.clear()
    tab.errors.clear()
    tab.open(file.as_uri())
    assert tab.errors == []
    assert [url for url in tab.requests if not url.startswith(("file:", "data:"))] == []
    assert tab.run("getComputedStyle(document.querySelector('.tile')).borderRadius") == "10px", (
        "the style is in the file"
    )
    broken_links = (
        "[...document.querySelectorAll('a[href^=\"#\"]')].filter(a => !document.querySelector(a.getAttribute('href')))"
    )
    assert tab.run(f"{broken_links}.length") == 0
    assert tab.run('document.querySelectorAll(\'a[href]:not([href^="#"]):not([href=""])\').length') == 0


def test_open_page_follows_the_run_without_a_reload(tab, tmp_path) -> None:
    folder = two_steps(tmp_path / "run")
    hold_lock(folder)
    tab.emulate()
    with serve_pages(folder) as address:
        tab.open(f"{address}/trials?kind=train&sort=task")
        tab.press("j")
        tab.press("j")
        here = tab.run("document.querySelector('.here').dataset.href")
        tab.run("window.kept = true")
        write_rows(folder / "rollouts/step_3.jsonl", [trial_row("new__c1", step=3, task="<b>new")])
        wait_until(lambda: tab.run("document.body.innerText.includes('<b>new')"))
        assert tab.run("window.kept") and tab.run("document.querySelector('.here').dataset.href") == here
        tab.run("document.querySelector('.filters input').focus()")
        (folder / "rollouts/step_3.jsonl").unlink()
        (folder / ".lock").unlink()
        time.sleep(2.5)
        assert tab.run("document.body.innerText.includes('<b>new')"), "nothing is replaced while a filter is typed"
        tab.run("document.activeElement.blur()")
        wait_until(lambda: tab.run("document.getElementById('status').innerText") == "finished")
        assert not tab.run("document.body.innerText.includes('<b>new')")
        assert tab.errors == []
