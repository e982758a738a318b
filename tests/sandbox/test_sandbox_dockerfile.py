"""A task's Dockerfile, honoured on top of the root filesystem, once."""

import asyncio
import logging
import os
import tarfile
from pathlib import Path

import leftovers
import pytest

from harbortrainer.sandbox import dockerfile_build, image_layers
from harbortrainer.sandbox.sandbox_errors import SandboxBuildError

EVERYTHING = """\
# a comment
ARG BASE=debian
FROM ${BASE}:12-slim AS final
LABEL maintainer="somebody"
ARG WHO=world
ENV GREETING="hello  ${WHO}" OTHER=${UNSET:-fallback}
ENV OLD style value
WORKDIR /app
WORKDIR sub
COPY one.txt two.txt ./
COPY --chmod=755 tool.sh /usr/local/bin/tool
COPY data /srv/data
COPY ["sp ace.txt", "/app/"]
COPY *.md docs/
ADD archive.tar.gz /opt/unpacked/
RUN echo "$GREETING" > greeting \\
    # in between
    && echo $WHO >> greeting
RUN ["/bin/sh", "-c", "echo json > /app/json"]
SHELL ["/bin/bash", "-c"]
RUN [[ -n $BASH_VERSION ]] && echo bash > /app/shell
RUN <<EOF
set -e
echo "here $GREETING" > /app/heredoc
EOF
COPY <<EOF /app/inline.txt
inline content
EOF
RUN echo 'worker:x:1234:1234::/app:/bin/bash' >> /etc/passwd
RUN rm -rf /usr/share/doc && mkdir /usr/share/doc && echo mine > /usr/share/doc/mine
USER worker
EXPOSE 80
CMD ["sleep", "infinity"]
"""
FILES = {
    "one.txt": "1",
    "two.txt": "2",
    "tool.sh": "#!/bin/sh\necho tool\n",
    "data/a/b": "deep",
    "sp ace.txt": "s",
    "x.md": "x",
    "y.md": "y",
}


async def test_every_instruction_that_can_be_is_honoured(make_sandbox, tmp_path, caplog):
    sandbox = await make_sandbox(dockerfile=EVERYTHING, files=FILES, start=False)
    (tmp_path / "inner").write_text("inner")
    with tarfile.open(sandbox.environment_dir / "archive.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "inner", arcname="inner")
    with caplog.at_level(logging.WARNING):
        await sandbox.start(force_build=False)

    async def out(command: str) -> str:
        return (await sandbox.exec(command)).stdout

    assert await out("pwd; id -un") == "/app/sub\nworker\n"
    assert await out('echo "$GREETING,$OTHER,$OLD,$WHO"') == "hello  world,fallback,style value,\n"
    assert await out("cat one.txt two.txt; tool; cat /srv/data/a/b '/app/sp ace.txt'") == "12tool\ndeeps"
    assert await out("ls docs; cat /opt/unpacked/inner; cat greeting") == "x.md\ny.md\ninnerhello  world\nworld\n"
    files = await out("cat /app/json /app/shell /app/heredoc /app/inline.txt")
    assert files == "json\nbash\nhere hello  world\ninline content\n"
    assert await out("ls /usr/share/doc") == "mine\n"
    said = [record.message for record in caplog.records if "local sandbox" in record.message]
    assert len(said) == 1
    assert all(word in said[0] for word in ("FROM debian:12-slim", "EXPOSE", "CMD"))


async def test_a_layer_is_built_once(make_sandbox, monkeypatch):
    builds, real = [], dockerfile_build.build

    async def counted(*args):
        builds.append(args)
        await real(*args)

    monkeypatch.setattr(dockerfile_build, "build", counted)
    dockerfile = f"FROM x\nRUN date +%N > /stamp; sleep 0.3\n# {os.urandom(4).hex()}\n"
    first, *others = await asyncio.gather(*(make_sandbox(dockerfile=dockerfile) for _ in range(4)))
    stamp = (await first.exec("cat /stamp")).stdout
    assert len(builds) == 1
    assert [(await other.exec("cat /stamp")).stdout for other in others] == [stamp] * 3


async def test_another_content_is_another_layer(make_sandbox):
    one = await make_sandbox(dockerfile="FROM x\nCOPY f /f\n", files={"f": "1"})
    two = await make_sandbox(dockerfile="FROM x\nCOPY f /f\n", files={"f": "2"})
    assert [(await s.exec("cat /f")).stdout for s in (one, two)] == ["1", "2"]


async def test_what_a_trial_changes_does_not_reach_the_layer(make_sandbox):
    dockerfile = "FROM x\nRUN echo original > /app.txt && echo original > /usr/share/app.txt\n"
    one = await make_sandbox(dockerfile=dockerfile)
    await one.exec("echo changed > /app.txt; rm /usr/share/app.txt")
    two = await make_sandbox(dockerfile=dockerfile)
    assert (await two.exec("cat /app.txt /usr/share/app.txt")).stdout == "original\noriginal\n"


async def test_a_large_layer_is_mounted_and_behaves_the_same(make_sandbox):
    dockerfile = "FROM x\nRUN mkdir /big && cd /big && seq 1000 | xargs touch && head -c 9M /dev/zero > /usr/share/z\n"
    sandbox = await make_sandbox(dockerfile=dockerfile)
    assert not sandbox._image.small
    result = await sandbox.exec("ls /big | wc -l; stat -c %s /usr/share/z; rm /big/1; echo x > /big/2; ls /big | wc -l")
    assert result.stdout == f"1000\n{9 << 20}\n999\n"
    assert (await (await make_sandbox(dockerfile=dockerfile)).exec("ls /big | wc -l")).stdout == "1000\n"


@pytest.mark.parametrize(
    ("dockerfile", "why"),
    [
        ("FROM x\nRUN echo to the log; exit 7\n", "line 2: RUN.*code 7: to the log"),
        ("FROM x\nCOPY missing /\n", "'missing' is not in the task's environment folder"),
        ("FROM x\nCOPY ../../secret /\n", "is not in the task's environment folder"),
        ("FROM x\nCOPY --from=other /a /b\n", "COPY --from=other.*cannot stand in for that.*buildah.*docker"),
        ("FROM x\nADD https://example.com/a /a\n", "ADD https.*cannot stand in for that"),
        ('FROM x\nENTRYPOINT ["/serve"]\n', "ENTRYPOINT.*cannot stand in"),
        ("FROM x\nHEALTHCHECK CMD true\n", "HEALTHCHECK.*cannot stand in"),
        ("FROM x\nFETCH a\n", "no such instruction"),
        ("RUN true\n", "no FROM"),
    ],
)
async def test_what_cannot_be_built_is_said(make_sandbox, dockerfile, why):
    with pytest.raises(SandboxBuildError, match=f"(?s){why}"):
        await make_sandbox(dockerfile=dockerfile)


async def test_a_link_in_the_context_that_leads_out_is_refused(make_sandbox):
    sandbox = await make_sandbox(dockerfile="FROM x\nCOPY f /f\n", start=False)
    (sandbox.environment_dir / "f").symlink_to("/etc/passwd")
    with pytest.raises(SandboxBuildError, match="leads out"):
        await sandbox.start(force_build=False)


async def test_a_failed_build_leaves_nothing(make_sandbox, layer_cache):
    with pytest.raises(SandboxBuildError):
        await make_sandbox(dockerfile="FROM x\nRUN touch /x\nRUN false\n")
    assert leftovers.unfinished(layer_cache) == []


async def test_compose_files_are_refused_in_words(make_sandbox):
    with pytest.raises(SandboxBuildError, match=r"docker-compose\.yaml.*no sidecars.*docker"):
        await make_sandbox(dockerfile="FROM x\n", files={"docker-compose.yaml": "services: {}\n"})


async def test_a_prebuilt_image_is_refused_on_the_hosts_root_and_said_on_another(make_sandbox, tmp_path):
    with pytest.raises(SandboxBuildError, match=r"docker_image 'some/image:1'.*cannot stand in for that"):
        await make_sandbox(task={"docker_image": "some/image:1"})
    (said,) = image_layers.notices(tmp_path, Path("/srv"), "some/image:1")
    assert "docker_image 'some/image:1' is not pulled" in said


async def test_another_root_filesystem_brings_its_variables(make_sandbox):
    dockerfile = "FROM x\nENV BOTH=$BASE-and-more\nRUN echo $BASE > /seen\n"
    sandbox = await make_sandbox(dockerfile=dockerfile, env={"BASE": "given"})
    assert (await sandbox.exec("cat /seen; echo $BOTH; command -v ls")).stdout == "given\ngiven-and-more\n/usr/bin/ls\n"


async def test_a_build_step_sees_no_secret_of_the_host(make_sandbox, tmp_path, monkeypatch):
    monkeypatch.setenv("TOKEN", "swordfish")
    (tmp_path / "secret").write_text("swordfish")
    dockerfile = f"FROM x\nRUN (env; cat {tmp_path}/secret; ls /root) > /seen 2>&1; true\n"
    sandbox = await make_sandbox(dockerfile=dockerfile)
    assert "swordfish" not in (await sandbox.exec("cat /seen")).stdout
