"""Images from a registry with a login, and the default registry of bare names."""

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

from harbortrainer.sandbox.errors_and_changes import SandboxBuildError
from harbortrainer.sandbox.images import build_support

LOGIN = base64.b64encode(b"me:swordfish").decode()


class Registry(BaseHTTPRequestHandler):
    """Registry that serves one image, an OCI layout on disk, to authenticated clients."""

    layout: Path

    def do_GET(self) -> None:
        if self.headers.get("Authorization") != f"Basic {LOGIN}":
            self._send(401, b"{}", "application/json", {"WWW-Authenticate": 'Basic realm="here"'})
        elif self.path.startswith("/v2/team/image/"):
            self._send_content(self.path.rpartition("/")[2])
        else:
            self._send(200, b"{}", "application/json", {})

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        """Suppress the request log."""

    def _send_content(self, name: str) -> None:
        if not name.startswith("sha256:"):
            name = json.loads((self.layout / "index.json").read_text())["manifests"][0]["digest"]
        content = (self.layout / "blobs/sha256" / name.removeprefix("sha256:")).read_bytes()
        is_manifest = "/manifests/" in self.path
        content_type = "application/vnd.oci.image.manifest.v1+json" if is_manifest else "application/octet-stream"
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        self._send(200, content, content_type, {"Docker-Content-Digest": digest})

    def _send(self, code: int, content: bytes, content_type: str, headers: dict[str, str]) -> None:
        self.send_response(code)
        for name, value in (headers | {"Content-Type": content_type, "Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Address of a registry without TLS that serves the image team/image:1."""
    store = ("--root", str(tmp_path / "store"), "--runroot", str(tmp_path / "run"))
    (tmp_path / "Dockerfile").write_text("FROM scratch\nCOPY Dockerfile /recipe\nENV FROM_REGISTRY=yes\n")
    build = ("build", "-q", "--isolation", "chroot", "-t", "localhost/it", str(tmp_path))
    for command in (build, ("push", "-q", "localhost/it", f"oci:{tmp_path}/layout")):
        subprocess.run(["buildah", *store, *command], check=True, capture_output=True)
    handler = type("ServedRegistry", (Registry,), {"layout": tmp_path / "layout"})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_port}"
        (tmp_path / "registries.conf").write_text(f'[[registry]]\nlocation = "{address}"\ninsecure = true\n')
        monkeypatch.setenv("CONTAINERS_REGISTRIES_CONF", str(tmp_path / "registries.conf"))
        monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
        yield address
        server.shutdown()


@needs_images
async def test_pull_uses_docker_login(make_sandbox, registry, tmp_path):
    task = {"docker_image": f"{registry}/team/image:1"}
    anonymous = await make_sandbox(task=task, image="build", start=False, cache_dir=str(tmp_path / "cache"))
    with pytest.raises(SandboxBuildError, match=r"cannot be pulled:(?s:.*)(unauthorized|authentication)"):
        await anonymous.start(force_build=False)
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker/config.json").write_text(json.dumps({"auths": {registry: {"auth": LOGIN}}}))
    logged_in = await make_sandbox(task=task, image="build", start=False, cache_dir=str(tmp_path / "cache"))
    image = await logged_in._build_image(60, False)
    assert image.env["FROM_REGISTRY"] == "yes"
    assert (Path(image.lowers[0]) / "recipe").read_text().startswith("FROM scratch")


@pytest.mark.parametrize(
    ("user_config", "sets_docker_hub"),
    [
        ("", True),
        ('# unqualified-search-registries = ["x"]\n[[registry]]\nlocation = "mirror"\n', True),
        ('unqualified-search-registries = ["quay.io"]\n', False),
        ("not toml [", False),
    ],
)
def test_bare_name_is_on_docker_hub_unless_configured(tmp_path, monkeypatch, user_config, sets_docker_hub):
    monkeypatch.delenv("CONTAINERS_REGISTRIES_CONF", raising=False)
    monkeypatch.setattr(build_support, "_read_user_config", lambda: user_config)
    config_path = build_support.builder_environment(tmp_path).get("CONTAINERS_REGISTRIES_CONF")
    assert (config_path is not None) == sets_docker_hub
    if config_path:
        text = Path(config_path).read_text()
        assert text.startswith('unqualified-search-registries = ["docker.io"]')
        assert ("mirror" in user_config) == ("mirror" in text)
