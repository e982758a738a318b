"""`harbortrainer view`: show a run, an evaluation or a folder of them as local pages, or write one HTML file."""

import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

from harbortrainer.view.run_folders import check_folder, open_store, reader_for, reader_of

if TYPE_CHECKING:
    from harbortrainer.view.run_list_site import RunListSite
    from harbortrainer.view.server import Site


def view_run(folder: Path, *, port: int, export: Path | None, trials: int, only: str, browser: bool) -> int:
    """Serve the pages of a folder until Ctrl-C, or write them to one file.

    Raises:
        UserError: The folder holds no readable run, the port is in use, or the file cannot be written.
    """
    if export is not None:
        from harbortrainer.view.file_export import export_run

        print(export_run(open_store(folder), export, trials=trials, only=only))
        return 0
    check_folder(folder)
    from harbortrainer.view.server import HOST, listening_socket, serve_pages

    with listening_socket(port) as listening:
        site = site_of(folder)
        site.preload()
        address = f"http://{HOST}:{listening.getsockname()[1]}"
        print(f"viewing {folder} at {address} (Ctrl-C to stop)", flush=True)
        if browser:
            webbrowser.open(address)
        serve_pages(site.app(), listening)
    return 0


def site_of(folder: Path) -> "Site | RunListSite":
    """Return the pages of a run or evaluation, or of a folder that has several.

    Raises:
        UserError: There is no run in the folder.
    """
    from harbortrainer.view.run_list import RunSet
    from harbortrainer.view.run_list_site import RunListSite
    from harbortrainer.view.server import Site

    if reader_of(folder) is None and (runs := RunSet(folder)).names():
        return RunListSite(runs)
    reader_for(folder)
    return Site(open_store(folder))
