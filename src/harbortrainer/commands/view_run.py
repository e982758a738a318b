"""`harbortrainer view`: show a run, an evaluation or a Prime-RL run as local pages, or write one HTML file."""

import webbrowser
from pathlib import Path

from harbortrainer.view.run_folders import open_store, reader_for


def view_run(folder: Path, *, port: int, export: Path | None, trials: int, only: str, browser: bool) -> int:
    """Serve the pages of a folder until Ctrl-C, or write them to one file.

    Raises:
        UserError: The folder holds no readable run, the port is in use, or the file cannot be written.
    """
    if export is not None:
        from harbortrainer.view.file_export import export_run

        print(export_run(open_store(folder), export, trials=trials, only=only))
        return 0
    reader_for(folder)
    from harbortrainer.view.server import HOST, Site, listening_socket, serve_pages

    with listening_socket(port) as listening:
        site = Site(open_store(folder))
        site.preload()
        address = f"http://{HOST}:{listening.getsockname()[1]}"
        print(f"viewing {folder} at {address} (Ctrl-C to stop)", flush=True)
        if browser:
            webbrowser.open(address)
        serve_pages(site.app(), listening)
    return 0
