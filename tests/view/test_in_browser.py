"""The pages in a real browser: their own policy refuses nothing, nothing leaves the machine, keys and theme work."""

import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
import uvicorn
from chromium import PROGRAM, Tab, browser_tab
from view_runs import run_folder, trial_row, two_steps

from harbortrainer.view.file_export import export_run
from harbortrainer.view.folder_kind import open_store
from harbortrainer.view.local_server import bound_socket
from harbortrainer.view.web_app import Site

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="Chromium is not here (.ci/run installs it)")
PAGES = ("/", "/tasks", "/trials", "/group/group1", "/trial/sort__a1", "/nowhere")


@contextmanager
def served(folder: Path) -> Generator[str]:
    """The address of a run's pages."""
    with bound_socket(0) as listening:
        config = uvicorn.Config(Site(open_store(folder)).app(), log_level="error", lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.should_exit = True
        thread.join(30)


@pytest.fixture(scope="module")
def tab(tmp_path_factory) -> Generator[Tab]:
    with browser_tab(tmp_path_factory.mktemp("profile")) as found:
        yield found


def background(tab: Tab) -> str:
    return str(tab.run("getComputedStyle(document.body).backgroundColor"))


def test_pages_load_nothing_from_elsewhere_and_fit_their_window(tab, tmp_path) -> None:
    long = "x" * 3000
    rows = [trial_row(f"t{index}__{index}", task=long, error=long, group="group1") for index in range(3)]
    for folder in (two_steps(tmp_path / "run"), run_folder(tmp_path / "long", rows)):
        with served(folder) as address:
            tab.requests.clear()
            tab.complaints.clear()
            pages = [*PAGES[:4], "/trial/t0__0" if folder.name == "long" else PAGES[4]]
            for width in (1280, 400):
                tab.show(width=width)
                for page in pages:
                    tab.open(address + page)
                    assert tab.run("document.documentElement.scrollWidth <= innerWidth"), (page, width)
            assert tab.complaints == []
            elsewhere = [url for url in tab.requests if not url.startswith((address, "data:"))]
            assert elsewhere == [] and any(url.endswith("/style.css") for url in tab.requests)


def test_keys_move_open_and_go_back_up(tab, tmp_path) -> None:
    tab.show()
    with served(two_steps(tmp_path / "run")) as address:
        tab.open(f"{address}/trials?kind=train&sort=task")
        for key in ("j", "j", "j"):
            tab.press(key)
        third = tab.run("document.querySelectorAll('tbody tr')[2].classList.contains('here')")
        assert third
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


def test_light_and_dark_follow_the_system_until_somebody_chooses(tab, tmp_path) -> None:
    with served(two_steps(tmp_path / "run")) as address:
        tab.show(dark=False)
        tab.open(address)
        light = background(tab)
        tab.show(dark=True)
        tab.open(address)
        dark = background(tab)
        assert light != dark
        tab.press("d")
        assert background(tab) == light
        tab.open(f"{address}/trials")
        assert background(tab) == light, "the choice is kept from page to page"
        tab.run("localStorage.clear()")


def test_a_file_needs_nothing_but_itself(tab, tmp_path) -> None:
    file = tmp_path / "run.html"
    export_run(open_store(two_steps(tmp_path / "run")), file, trials=5)
    tab.requests.clear()
    tab.complaints.clear()
    tab.open(file.as_uri())
    assert tab.complaints == []
    assert [url for url in tab.requests if not url.startswith(("file:", "data:"))] == []
    assert tab.run("getComputedStyle(document.querySelector('.tile')).borderRadius") == "10px", "its style is its own"
    dead = (
        "[...document.querySelectorAll('a[href^=\"#\"]')].filter(a => !document.querySelector(a.getAttribute('href')))"
    )
    assert tab.run(f"{dead}.length") == 0
    assert tab.run('document.querySelectorAll(\'a[href]:not([href^="#"]):not([href=""])\').length') == 0
