"""A stand-in for the Hugging Face hub that serves one dataset."""

import hashlib
import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def serve_dataset(name: str, files: dict[str, bytes]) -> Generator[str]:
    """Serve a dataset with one commit, `COMMIT`, which is also `main`; yields the hub's address."""

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            api, blobs = f"/api/datasets/{name}", f"/datasets/{name}/resolve/{COMMIT}/"
            revision = path.removeprefix(api).strip("/").removeprefix("revision/")
            if path.startswith(blobs) and path.removeprefix(blobs) in files:
                self.answer(200, files[path.removeprefix(blobs)])
            elif path in (api, f"{api}/revision/main", f"{api}/revision/{COMMIT}"):
                siblings = [{"rfilename": file, "size": len(content)} for file, content in files.items()]
                info = {"id": name, "sha": COMMIT, "siblings": siblings, "private": False, "tags": [], "downloads": 0}
                self.answer(200, json.dumps(info).encode())
            elif path == f"{api}/tree/{COMMIT}":
                listed = [
                    {"type": "file", "path": file, "size": len(content), "oid": "0" * 40}
                    for file, content in files.items()
                ]
                self.answer(200, json.dumps(listed).encode())
            elif "unexplained" in path:  # as a mirror answers, which does not say what is missing
                self.answer(404, b"{}")
            else:
                known = path.startswith(api) and revision
                self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound" if known else "RepoNotFound"})

        def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            etag = hashlib.sha1(body, usedforsecurity=False).hexdigest()
            sent = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Content-Length": str(len(body)), **(headers or {})}
            for key, value in sent.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
