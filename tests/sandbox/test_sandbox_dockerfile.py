"""A task's Dockerfile runs on the host's root filesystem; its layer is built once for the same content."""

import asyncio
import logging
import os
from pathlib import Path

import leftovers
import pytest

from harbortrainer.sandbox import host_root_build
from harbortrainer.sandbox.dockerfile import parse
from harbortrainer.sandbox.errors_and_changes import SandboxBuildError

ALL_INSTRUCTIONS = """\
# a comment
FROM debian:12-slim AS final
ENV WHO=world
ENV GREETING="hello  ${WHO}" OTHER=$WHO
WORKDIR /app
WORKDIR sub
COPY one.txt two.txt ./
COPY tool.sh /usr/local/bin/tool
COPY data /srv/data
COPY "sp ace.txt" /app/
COPY one.txt /app/$WHO
RUN echo "$GREETING" > greeting \\
    # in between
    && echo $WHO ${UNSET:-fallback} >> greeting
RUN [ -n "$WHO" ] && chmod +x /usr/local/bin/tool
RUN echo 'worker:x:1234:1234::/app:/bin/bash' >> /etc/passwd
RUN rm -rf /usr/share/doc && mkdir /usr/share/doc && echo new > /usr/share/doc/new
USER worker
"""
FILES = {
    "one.txt": "1",
    "two.txt": "2",
    "tool.sh": "#!/bin/sh\necho tool\n",
    "data/a/b": "deep",
    "sp ace.txt": "s",
}


async def test_runs_every_supported_instruction(make_sandbox, caplog):
    with caplog.at_level(logging.WARNING):
        sandbox = await make_sandbox(dockerfile=ALL_INSTRUCTIONS, files=FILES)

    async def out(command: str) -> str:
        return (await sandbox.exec(command)).stdout

    assert await out("pwd; id -un") == "/app/sub\nworker\n"
    assert await out('echo "$GREETING,$OTHER,$WHO"') == "hello  world,world,world\n"
    assert await out("cat one.txt two.txt; tool; cat /srv/data/a/b '/app/sp ace.txt' /app/world") == "12tool\ndeeps1"
    assert await out("cat greeting") == "hello  world\nworld fallback\n"
    assert await out("ls /usr/share/doc") == "new\n"
    messages = [record.message for record in caplog.records if "local sandbox" in record.message]
    assert len(messages) == 1
    assert "FROM debian:12-slim is not pulled" in messages[0]


@pytest.mark.parametrize(
    ("instructions", "expected"),
    [
        ("ARG WHO=world", ["line 2: ARG WHO=world"]),
        ('SHELL ["/bin/bash", "-c"]', ['line 2: SHELL ["/bin/bash", "-c"]']),
        ("ADD archive.tar.gz /opt", ["line 2: ADD archive.tar.gz /opt"]),
        ("ADD https://example.com/a /a", ["line 2: ADD https://example.com/a /a"]),
        ('ENTRYPOINT ["/serve"]', ['line 2: ENTRYPOINT ["/serve"]']),
        ("HEALTHCHECK CMD true", ["line 2: HEALTHCHECK CMD true"]),
        ("VOLUME /v\nSTOPSIGNAL 9", ["line 2: VOLUME /v", "line 3: STOPSIGNAL 9"]),
        ('EXPOSE 80\nLABEL a=b\nCMD ["sleep", "infinity"]', []),
        ("ONBUILD RUN true", ["line 2: ONBUILD RUN true"]),
        ("FETCH a", ["line 2: FETCH a"]),
        ("RUN --mount=type=cache,target=/c --network=none true", ["RUN --mount=type=cache,target=/c --network=none"]),
        ('RUN ["true"]', ["line 2: RUN with a JSON list"]),
        ("RUN <<EOF\ntrue\nEOF\nUSER a:b", ["line 2: RUN with a heredoc", "line 5: USER with a group"]),
        ("COPY <<EOF /a\ntrue\nEOF", ["line 2: COPY with a heredoc"]),
        ("COPY --from=other --chmod=755 /a /b", ["line 2: COPY --from=other --chmod=755"]),
        ("COPY *.md /docs/", ["line 2: COPY with a pattern or a JSON list"]),
        ('COPY ["a", "/b"]', ["line 2: COPY with a pattern or a JSON list"]),
        ("ENV OLD style", ["line 2: ENV without ="]),
        ("ENV A=${B:-c}", ["line 2: ENV with more than a name in ${}"]),
        ("WORKDIR ${B:+c}", ["line 2: WORKDIR with more than a name in ${}"]),
        ("RUN true\nFROM y", ["line 3: FROM of a second stage"]),
    ],
)
def test_names_each_unsupported_instruction_and_form(instructions: str, expected: list[str]) -> None:
    unsupported = parse(f"FROM x\n{instructions}\n").unsupported
    assert len(unsupported) == len(expected)
    assert all(part in message for part, message in zip(expected, unsupported, strict=True))


def test_names_arg_and_platform_before_first_stage() -> None:
    parsed = parse("ARG BASE=debian\nFROM --platform=linux/amd64 ${BASE}:12-slim\n")
    assert parsed.unsupported == [
        "Dockerfile line 1: ARG BASE=debian",
        "Dockerfile line 2: FROM --platform=linux/amd64",
    ]
    assert parsed.base == "debian:12-slim"


async def test_refuses_unsupported_instructions_in_one_line(make_sandbox):
    with pytest.raises(SandboxBuildError) as raised:
        await make_sandbox(dockerfile="FROM x\nCOPY --chmod=755 a /b\nRUN <<EOF\ntouch /x\nEOF\n")
    message = str(raised.value)
    refused = (
        "Dockerfile line 2: COPY --chmod=755; Dockerfile line 3: RUN with a heredoc: "
        "not supported on the host's root filesystem"
    )
    assert message.startswith(refused)
    assert all(part in message for part in ("set image = 'auto'", "environment_type = 'docker'"))
    assert "\n" not in message


async def test_layer_is_built_once(make_sandbox, monkeypatch):
    builds, build = [], host_root_build.build

    async def counting_build(*args):
        builds.append(args)
        await build(*args)

    monkeypatch.setattr(host_root_build, "build", counting_build)
    dockerfile = f"FROM x\nRUN date +%N > /stamp; sleep 0.3\n# {os.urandom(4).hex()}\n"
    first, *others = await asyncio.gather(*(make_sandbox(dockerfile=dockerfile) for _ in range(4)))
    stamp = (await first.exec("cat /stamp")).stdout
    assert len(builds) == 1
    assert [(await other.exec("cat /stamp")).stdout for other in others] == [stamp] * 3


async def test_changed_file_builds_new_layer(make_sandbox):
    one = await make_sandbox(dockerfile="FROM x\nCOPY f /f\n", files={"f": "1"})
    two = await make_sandbox(dockerfile="FROM x\nCOPY f /f\n", files={"f": "2"})
    assert [(await s.exec("cat /f")).stdout for s in (one, two)] == ["1", "2"]


async def test_changes_in_trial_do_not_reach_layer(make_sandbox):
    dockerfile = "FROM x\nRUN echo original > /app.txt && echo original > /usr/share/app.txt\n"
    one = await make_sandbox(dockerfile=dockerfile)
    await one.exec("echo changed > /app.txt; rm /usr/share/app.txt")
    two = await make_sandbox(dockerfile=dockerfile)
    assert (await two.exec("cat /app.txt /usr/share/app.txt")).stdout == "original\noriginal\n"


async def test_large_layer_is_mounted_and_behaves_the_same(make_sandbox):
    dockerfile = "FROM x\nRUN mkdir /big && cd /big && seq 1000 | xargs touch && head -c 9M /dev/zero > /usr/share/z\n"
    sandbox = await make_sandbox(dockerfile=dockerfile)
    assert not sandbox._image.small
    result = await sandbox.exec("ls /big | wc -l; stat -c %s /usr/share/z; rm /big/1; echo x > /big/2; ls /big | wc -l")
    assert result.stdout == f"1000\n{9 << 20}\n999\n"
    assert (await (await make_sandbox(dockerfile=dockerfile)).exec("ls /big | wc -l")).stdout == "1000\n"


@pytest.mark.parametrize(
    ("dockerfile", "error"),
    [
        ("FROM x\nRUN echo to the log; exit 7\n", "line 2: RUN.*code 7: to the log"),
        ("FROM x\nCOPY missing /\n", "'missing' is not in the task's environment folder"),
        ("FROM x\nCOPY ../../secret /\n", "is not in the task's environment folder"),
        (
            "FROM x\nCOPY --from=other /a /b\n",
            "COPY --from=other.*not supported on the host's root filesystem.*buildah.*docker",
        ),
        ("FROM x\nADD https://example.com/a /a\n", "ADD https.*not supported on the host's root filesystem"),
        ('FROM x\nENTRYPOINT ["/serve"]\n', "ENTRYPOINT.*not supported on the host's root"),
        ("FROM x\nHEALTHCHECK CMD true\n", "HEALTHCHECK.*not supported on the host's root"),
        ("FROM x\nCOPY alone\n", "line 2: COPY alone: needs a source and a target"),
        ("FROM x\nFETCH a\n", "FETCH a.*not supported on the host's root"),
        ("ARG A=1 B\nFROM x\n", "ARG that is not NAME=value"),
        ("RUN true\n", "no FROM"),
    ],
)
async def test_invalid_dockerfile_raises_build_error(make_sandbox, dockerfile, error):
    with pytest.raises(SandboxBuildError, match=f"(?s){error}"):
        await make_sandbox(dockerfile=dockerfile)


async def test_refuses_link_out_of_context(make_sandbox):
    sandbox = await make_sandbox(dockerfile="FROM x\nCOPY f /f\n", start=False)
    (sandbox.environment_dir / "f").symlink_to("/etc/passwd")
    with pytest.raises(SandboxBuildError, match="leads out"):
        await sandbox.start(force_build=False)


async def test_failed_build_leaves_no_files(make_sandbox, layer_cache):
    with pytest.raises(SandboxBuildError):
        await make_sandbox(dockerfile="FROM x\nRUN touch /x\nRUN false\n")
    assert leftovers.unfinished(layer_cache) == []


async def test_refuses_compose_files(make_sandbox):
    with pytest.raises(SandboxBuildError, match=r"docker-compose\.yaml.*no sidecars.*docker"):
        await make_sandbox(dockerfile="FROM x\n", files={"docker-compose.yaml": "services: {}\n"})


async def test_prebuilt_image_is_refused_on_host_root_and_reported_on_other_rootfs(make_sandbox, tmp_path):
    with pytest.raises(
        SandboxBuildError, match=r"docker_image 'some/image:1'.*not supported on the host's root filesystem"
    ):
        await make_sandbox(task={"docker_image": "some/image:1"})
    (message,) = host_root_build.ignored_settings(tmp_path, Path("/srv"), "some/image:1")
    assert "docker_image 'some/image:1' is not pulled" in message


async def test_env_setting_applies_to_build_and_commands(make_sandbox):
    dockerfile = "FROM x\nENV DERIVED=$BASE-and-more\nRUN echo $BASE > /build-output\n"
    sandbox = await make_sandbox(dockerfile=dockerfile, env={"BASE": "given"})
    result = await sandbox.exec("cat /build-output; echo $DERIVED; command -v ls")
    assert result.stdout == "given\ngiven-and-more\n/usr/bin/ls\n"


async def test_build_step_sees_no_host_secret(make_sandbox, tmp_path, monkeypatch):
    monkeypatch.setenv("TOKEN", "swordfish")
    (tmp_path / "secret").write_text("swordfish")
    dockerfile = f"FROM x\nRUN (env; cat {tmp_path}/secret; ls /root) > /build-output 2>&1; true\n"
    sandbox = await make_sandbox(dockerfile=dockerfile)
    assert "swordfish" not in (await sandbox.exec("cat /build-output")).stdout
