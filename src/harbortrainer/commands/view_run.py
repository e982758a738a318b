"""`harbortrainer view`: a run, an evaluation or a run of Prime-RL as local pages, or as one file."""

import webbrowser
from pathlib import Path

from harbortrainer.view.folder_kind import kind_of, open_store


def view_run(folder: Path, *, port: int, export: Path | None, trials: int, only: str, browser: bool) -> int:
    """Serve the pages of a folder until Ctrl-C, or write them into one file.

    Raises:
        UserError: There is no run in the folder, it cannot be read, the port is in use, or the file cannot be written.
    """
    if export is not None:
        from harbortrainer.view.file_export import export_run

        print(export_run(open_store(folder), export, trials=trials, only=only))
        return 0
    kind_of(folder)
    from harbortrainer.view.local_server import HOST, bound_socket, serve_pages
    from harbortrainer.view.web_app import Site

    with bound_socket(port) as listening:
        site = Site(open_store(folder))
        site.get_ready()
        address = f"http://{HOST}:{listening.getsockname()[1]}"
        print(f"{folder} is shown at {address}; Ctrl-C ends it", flush=True)
        if browser:
            webbrowser.open(address)
        serve_pages(site.app(), listening)
    return 0
