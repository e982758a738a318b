"""A stand-in for the Hugging Face hub that accepts model uploads, with files inside the commit."""

import base64
import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from huggingface_hub import ModelCard

OID = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class HubModels:
    """The content of the hub."""

    url: str = ""
    token: str = "hf_right"
    private: dict[str, bool] = field(default_factory=dict)
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)

    def commit(self, name: str, lines: list[dict]) -> None:
        """Apply a commit."""
        for line in lines:
            if line["key"] == "file":
                self.files[name][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            elif line["key"] == "deletedFile":
                del self.files[name][line["value"]["path"]]


@contextmanager
def serve_model_hub() -> Generator[HubModels]:
    """Serve an empty hub."""
    hub = HubModels()

    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name, _, rest = self.path.partition("?")[0].removeprefix("/api/models/").partition("/tree/")
            name = name.partition("/revision/")[0]
            files = hub.files.get(name)
            if files is None:
                self.answer(404, {})
            elif rest:
                listed = [{"type": "file", "path": path, "size": len(own), "oid": OID} for path, own in files.items()]
                self.answer(200, listed)
            else:
                siblings = [{"rfilename": path} for path in files]
                card = ModelCard(files.get("README.md", b"").decode()).data.to_dict()
                known = {"id": name, "sha": OID, "private": hub.private[name], "siblings": siblings, "cardData": card}
                self.answer(200, known)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            path = self.path.partition("?")[0]
            name = path.removeprefix("/api/models/").rpartition("/")[0].rpartition("/")[0]
            if path == "/api/validate-yaml":
                self.answer(200, {"errors": [], "warnings": []})
            elif self.headers.get("Authorization") != f"Bearer {hub.token}":
                self.answer(401, {"error": "Invalid username or password."})
            elif path == "/api/repos/create":
                self.create(json.loads(body))
            elif "/preupload/" in path:
                wanted = json.loads(body)["files"]
                modes = [{"path": own["path"], "uploadMode": "regular", "shouldIgnore": False} for own in wanted]
                self.answer(200, {"files": modes})
            else:
                hub.commit(name, [json.loads(line) for line in body.splitlines()])
                self.answer(200, {"commitUrl": f"{hub.url}/{name}/commit/{OID}", "commitOid": OID})

        def create(self, request: dict) -> None:
            name = f"{request['organization']}/{request['name']}" if request.get("organization") else request["name"]
            exists = name in hub.files
            if not exists:
                hub.private[name] = request.get("private") or request.get("visibility") == "private"
                hub.files[name] = {"old.safetensors": b"old", "LICENSE": b"MIT"}
            self.answer(409 if exists else 200, {"url": f"{hub.url}/{name}"})

        def answer(self, status: int, content: object) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
