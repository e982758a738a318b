"""Images from a registry that wants a login, and what a name without a registry means."""

import base64
import hashlib
import json
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from image_setup import needs_images

from harbortrainer.sandbox.images import registries
from harbortrainer.sandbox.sandbox_errors import SandboxBuildError

LOGIN = base64.b64encode(b"me:swordfish").decode()


class Registry(BaseHTTPRequestHandler):
    """Serves one image, an OCI layout on the disk, to who has logged in."""

    layout: Path

    def do_GET(self) -> None:
        if self.headers.get("Authorization") != f"Basic {LOGIN}":
            self._answer(401, b"{}", "application/json", {"WWW-Authenticate": 'Basic realm="here"'})
        elif self.path.startswith("/v2/team/image/"):
            self._blob(self.path.rpartition("/")[2])
        else:
            self._answer(200, b"{}", "application/json", {})

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""

    def _blob(self, name: str) -> None:
        if not name.startswith("sha256:"):
            name = json.loads((self.layout / "index.json").read_text())["manifests"][0]["digest"]
        content = (self.layout / "blobs/sha256" / name.removeprefix("sha256:")).read_bytes()
        is_manifest = "/manifests/" in self.path
        kind = "application/vnd.oci.image.manifest.v1+json" if is_manifest else "application/octet-stream"
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        self._answer(200, content, kind, {"Docker-Content-Digest": digest})

    def _answer(self, code: int, content: bytes, kind: str, headers: dict[str, str]) -> None:
        self.send_response(code)
        for name, value in (headers | {"Content-Type": kind, "Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a registry with the image team/image:1, which this machine may reach without TLS."""
    store = ("--root", str(tmp_path / "store"), "--runroot", str(tmp_path / "run"))
    (tmp_path / "Dockerfile").write_text("FROM scratch\nCOPY Dockerfile /recipe\nENV FROM_REGISTRY=yes\n")
    built = ("build", "-q", "--isolation", "chroot", "-t", "localhost/it", str(tmp_path))
    for command in (built, ("push", "-q", "localhost/it", f"oci:{tmp_path}/layout")):
        subprocess.run(["buildah", *store, *command], check=True, capture_output=True)
    kind = type("Serving", (Registry,), {"layout": tmp_path / "layout"})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_port}"
        (tmp_path / "registries.conf").write_text(f'[[registry]]\nlocation = "{address}"\ninsecure = true\n')
        monkeypatch.setenv("CONTAINERS_REGISTRIES_CONF", str(tmp_path / "registries.conf"))
        monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
        yield address
        server.shutdown()


@needs_images
async def test_images_come_with_the_users_docker_login(make_sandbox, registry, tmp_path):
    task = {"docker_image": f"{registry}/team/image:1"}
    stranger = await make_sandbox(task=task, image="build", start=False, cache_dir=str(tmp_path / "cache"))
    with pytest.raises(SandboxBuildError, match=r"cannot be pulled:(?s:.*)(unauthorized|authentication)"):
        await stranger.start(force_build=False)
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker/config.json").write_text(json.dumps({"auths": {registry: {"auth": LOGIN}}}))
    user = await make_sandbox(task=task, image="build", start=False, cache_dir=str(tmp_path / "cache"))
    image = await user._built(60, False)
    assert image.env["FROM_REGISTRY"] == "yes"
    assert (Path(image.lowers[0]) / "recipe").read_text().startswith("FROM scratch")


@pytest.mark.parametrize(
    ("users", "ours"),
    [
        ("", True),
        ('# unqualified-search-registries = ["x"]\n[[registry]]\nlocation = "mirror"\n', True),
        ('unqualified-search-registries = ["quay.io"]\n', False),
        ("not toml [", False),
    ],
)
def test_a_bare_name_is_docker_hubs_unless_the_user_says_otherwise(tmp_path, monkeypatch, users, ours):
    monkeypatch.delenv("CONTAINERS_REGISTRIES_CONF", raising=False)
    monkeypatch.setattr(registries, "_users_file", lambda: users)
    named = registries.variables(tmp_path).get("CONTAINERS_REGISTRIES_CONF")
    assert (named is not None) == ours
    if named:
        text = Path(named).read_text()
        assert text.startswith('unqualified-search-registries = ["docker.io"]')
        assert ("mirror" in users) == ("mirror" in text)
