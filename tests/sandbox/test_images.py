"""Sandboxes on task images that buildah builds from a local base image."""

import asyncio
from pathlib import Path

import pytest
from image_setup import BASE, needs_images

from harbortrainer.sandbox.errors_and_changes import SandboxBuildError, SandboxStartError
from harbortrainer.sandbox.images.buildah import Buildah

pytestmark = needs_images

ALL_INSTRUCTIONS = f"""\
ARG BASE={BASE}
FROM ${{BASE}} AS builder
ARG WHO=world
RUN echo "made for $WHO" > /made && touch /only-in-the-first-stage
FROM ${{BASE}}
SHELL ["/bin/bash", "-c"]
ENV GREETING="hello you" PLACE=/srv/app
COPY --from=builder /made /srv/
COPY --chmod=755 tool.sh /usr/local/bin/tool
ADD archive.tar.gz /opt/unpacked/
RUN [[ -n $BASH_VERSION ]] && useradd --create-home --uid 1234 worker && rm /usr/bin/make
RUN cat > /quoted-heredoc << 'END'
$GREETING unexpanded
END
RUN <<EOF
set -e
echo "here, $GREETING" > /heredoc
EOF
COPY <<EOF <<'RAW' /inline/
$GREETING
EOF
$GREETING
RAW
WORKDIR $PLACE
WORKDIR sub
USER worker
RUN id -un > /tmp/built-by && getent hosts "$(hostname)" > /tmp/resolved
CMD ["never"]
"""


async def test_every_workdir_folder_exists(make_sandbox):
    sandbox = await make_sandbox(
        dockerfile=f"FROM {BASE}\nWORKDIR /srv/first\nWORKDIR deeper\nWORKDIR /app\n", image="build"
    )
    result = await sandbox.exec("pwd; ls -d /srv/first /srv/first/deeper")
    assert result.stdout.split() == ["/app", "/srv/first", "/srv/first/deeper"]


async def test_variables_in_workdir_are_replaced(make_sandbox):
    sandbox = await make_sandbox(
        dockerfile=f"FROM {BASE}\nARG OWN=/srv/own\nENV AT=/srv/at NAME='a b'\nWORKDIR \"$AT/q\"\n"
        "WORKDIR ${AT}/$NAME\nWORKDIR $OWN\nWORKDIR deeper\nWORKDIR /srv/literal\\$AT\nWORKDIR /app\n",
        image="build",
    )
    result = await sandbox.exec("find / -maxdepth 1 -name '*[$\"]*'; find /srv -mindepth 1 | sort")
    assert result.stdout.splitlines() == ["/srv/at", "/srv/at/a b", "/srv/at/q", "/srv/literal$AT"]


async def test_every_dockerfile_instruction_takes_effect(make_sandbox, tmp_path):
    sandbox = await make_sandbox(
        dockerfile=ALL_INSTRUCTIONS,
        files={"tool.sh": "#!/bin/sh\necho tool\n", ".dockerignore": "secret\n", "secret": "s"},
        image="build",
        start=False,
    )
    write_archive(tmp_path, sandbox.environment_dir / "archive.tar.gz")
    await sandbox.start(force_build=False)

    async def out(command: str) -> str:
        result = await sandbox.exec(command)
        return result.stdout + result.stderr

    user_info = await out("pwd; id -un; id -u; echo ~; cat /tmp/built-by")
    assert user_info.split() == ["/srv/app/sub", "worker", "1234", "/home/worker", "worker"]
    assert await out("echo $GREETING; tool; cat /srv/made") == "hello you\ntool\nmade for world\n"
    assert await out("cat /opt/unpacked/inner /heredoc /quoted-heredoc") == (
        "inner\nhere, hello you\n$GREETING unexpanded\n"
    )
    assert await out("cat /inline/EOF /inline/RAW") == "hello you\n$GREETING\n"
    assert await out("ls /only-in-the-first-stage /usr/bin/make 2>&1 | grep -c 'No such file'") == "2\n"
    assert (await sandbox.exec("touch /root-owned; id -u", user="root")).stdout == "0\n"
    assert await out("hostname; cat /etc/hostname; ls /home") == "sandbox\nsandbox\nworker\n"
    assert (await out("getent hosts sandbox; cat /tmp/resolved")).split() == ["127.0.1.1", "sandbox"] * 2


def write_archive(scratch: Path, path: Path) -> None:
    import tarfile

    (scratch / "inner").write_text("inner\n")
    with tarfile.open(path, "w:gz") as tar:
        tar.add(scratch / "inner", arcname="inner")


async def test_group_of_image_user_applies_to_every_command(make_sandbox):
    sandbox = await make_sandbox(dockerfile=f"FROM {BASE}\nUSER games:users\nRUN id > /tmp/built\n", image="build")
    assert (await sandbox.exec("id; cat /tmp/built")).stdout == "uid=5(games) gid=100(users) groups=100(users)\n" * 2


async def test_trial_changes_do_not_reach_image(make_sandbox):
    dockerfile = f"FROM {BASE}\nRUN echo original > /app.txt\nWORKDIR /only/named\n"
    one = await make_sandbox(dockerfile=dockerfile, image="build")
    changed = await one.exec("echo changed > /app.txt; rm /usr/bin/git /etc/debian_version; cat /app.txt; pwd")
    assert changed.stdout == "changed\n/only/named\n"
    two = await make_sandbox(dockerfile=dockerfile, image="build")
    result = await two.exec("cat /app.txt; ls /usr/bin/git /etc/debian_version")
    assert result.stdout == "original\n/etc/debian_version\n/usr/bin/git\n"


async def test_images_with_same_first_instructions_share_layers(make_sandbox):
    """A build beside another test that removes images can miss buildah's cache: two of four images suffice."""
    first = f"FROM {BASE}\nRUN head -c 3M /dev/urandom > /shared\n"
    sandboxes = [await make_sandbox(dockerfile=f"{first}RUN echo {n} > /own\n", image="build") for n in range(4)]
    images = [sandbox._image.lowers for sandbox in sandboxes]
    assert len({own for own, *_ in images}) == 4
    assert len({tuple(shared) for _, *shared in images}) < 4


async def test_prebuilt_image_is_used_by_name(make_sandbox):
    sandbox = await make_sandbox(files={"f": "1"}, task={"docker_image": BASE, "workdir": "/work"}, image="build")
    assert (await sandbox.exec("cat /work/f; head -c 2 /etc/debian_version")).stdout == "112"


async def test_entrypoint_runs_beside_commands(make_sandbox):
    script = '#!/bin/sh\necho $MARK > /tmp/started; (sleep 0.5; touch /tmp/ready; sleep 100) &\nexec "$@"\n'
    dockerfile = f"""FROM {BASE}
ENV MARK=up
COPY --chmod=755 up.sh /up.sh
HEALTHCHECK --interval=1s CMD test -e /tmp/ready
ENTRYPOINT ["/up.sh"]
"""
    sandbox = await make_sandbox(dockerfile=dockerfile, files={"up.sh": script}, image="build")
    result = await sandbox.exec("cat /tmp/started; ls /tmp/ready; ps ax | grep -o '[s]leep infinity' | head -1")
    assert result.stdout == "up\n/tmp/ready\nsleep infinity\n"


@pytest.mark.parametrize(
    ("instruction", "error"),
    [
        (
            'ENTRYPOINT ["/bin/sh", "-c", "echo broken; exit 3"]',
            "ENTRYPOINT ended at once with code 3 and printed broken",
        ),
        ("HEALTHCHECK --interval=100ms --timeout=1s --retries=1 CMD echo no; false", "HEALTHCHECK failed.*code 1: no"),
    ],
)
async def test_failed_entrypoint_or_healthcheck_is_start_error(make_sandbox, instruction, error):
    with pytest.raises(SandboxStartError, match=error):
        await make_sandbox(dockerfile=f"FROM {BASE}\n{instruction}\n", image="build")


@pytest.mark.parametrize(
    ("dockerfile", "error"),
    [
        (f"FROM {BASE}\nRUN echo to the log; exit 7\n", "(?s)to the log.*RUN echo to the log; exit 7.*status 7"),
        ("FROM localhost/nowhere:1\n", "localhost/nowhere:1"),
        (f"FROM {BASE}\nCOPY missing /\n", "missing"),
    ],
)
async def test_build_error_has_reason(make_sandbox, dockerfile, error):
    with pytest.raises(SandboxBuildError, match=error):
        await make_sandbox(dockerfile=dockerfile, image="build")


DOCKERFILE_WITHOUT_TMUX = f"""\
FROM {BASE} AS whole
RUN mkdir /slim && for program in bash sh cat ls sleep env grep; do \\
    file=$(readlink -f $(command -v $program)); cp --parents $file $(ldd $file | grep -o '/[^ ]*') /slim; \\
    ln -s $file /slim/$program; done
FROM scratch
COPY --from=whole /slim /
ENV PATH=/
COPY --from=whole /slim/usr/bin/bash /bin/bash
COPY --from=whole /slim/usr/bin/dash /bin/sh
"""


async def test_image_without_tmux_gets_only_hosts_tmux(make_sandbox):
    sandbox = await make_sandbox(dockerfile=DOCKERFILE_WITHOUT_TMUX, image="build")
    result = await sandbox.exec(
        "export PATH=/:/usr/bin TMUX_TMPDIR=/logs/agent; "
        "tmux new-session -d -s one 'env > /environment; sleep 100' && tmux ls; "
        "until grep -s ^TMUX= /environment; do sleep 0.05; done; grep LOC /environment; ls /usr/bin",
        timeout_sec=20,
    )
    assert "one: 1 windows" in result.stdout
    assert "LOCPATH" not in result.stdout
    assert set(result.stdout.split("TMUX=")[1].split()[1:]) == {
        "bash",
        "cat",
        "dash",
        "env",
        "grep",
        "ls",
        "sleep",
        "tmux",
    }


async def test_concurrent_requests_share_one_build(make_sandbox, monkeypatch):
    builds, build = [], Buildah.build

    async def counting_build(self, *args):
        builds.append(args)
        return await build(self, *args)

    monkeypatch.setattr(Buildah, "build", counting_build)
    dockerfile = f"FROM {BASE}\nRUN date +%N > /stamp; sleep 0.3\n"
    sandboxes = await asyncio.gather(*(make_sandbox(dockerfile=dockerfile, image="build") for _ in range(4)))
    assert len(builds) == 1
    assert len({(await sandbox.exec("cat /stamp")).stdout for sandbox in sandboxes}) == 1


async def test_hard_links_survive_writes(make_sandbox):
    dockerfile = f"FROM {BASE}\nRUN cd /srv && echo 1 > one && ln one two && echo 3 > three\n"
    sandbox = await make_sandbox(dockerfile=dockerfile, image="build")
    result = await sandbox.exec(
        "cd /srv; echo more >> one; ln -f three four; cat two; stat -c %i one two three four | uniq -c"
    )
    first, second, *counts = result.stdout.split("\n")[:4]
    assert [first, second] == ["1", "more"]
    assert [line.split()[0] for line in counts] == ["2", "2"]


@pytest.mark.parametrize(("line", "home"), [("", "/home/boss"), ("ENV HOME=/srv/own\n", "/srv/own")])
async def test_home_of_root_is_as_the_image_says(make_sandbox, line, home):
    entry = "root:x:0:0:root:/home/boss:/bin/bash"
    sandbox = await make_sandbox(
        dockerfile=f"FROM {BASE}\nRUN sed -i 's#^root:.*#{entry}#' /etc/passwd\n{line}", image="build"
    )
    assert (await sandbox.exec("echo $HOME")).stdout == f"{home}\n"
    assert (await sandbox.exec("echo $HOME", user="root")).stdout == f"{home}\n"
