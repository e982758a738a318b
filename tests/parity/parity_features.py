"""Harbor's features, each a row of the table in docs/harbor.md."""

from parity_feature import DOCKERFILE, SOLVED, Feature, Place

ONE = "echo 1 > /logs/verifier/reward.txt"
SEPARATE = """
artifacts = ["/app/answer"]
[verifier]
environment_mode = "separate"
"""
GRADER = "FROM debian:12-slim\nCOPY test.sh /tests/test.sh\n"

REWARDS = (
    Feature(name="one step, solved"),
    Feature(name="one step, not solved", types="true"),
    Feature(name="reward.txt, a fraction", test="echo 0.25 > /logs/verifier/reward.txt; echo seen"),
    Feature(
        name="reward.json, several rewards",
        test='echo \'{"reward": 0.5, "style": 1}\' > /logs/verifier/reward.json',
    ),
    Feature(
        name="reward.json and reward.txt",
        test=f"{ONE}; echo '{{\"reward\": 0.5}}' > /logs/verifier/reward.json",
    ),
    Feature(name="no reward", test="true"),
)

STEPS = (
    Feature(
        name="steps, mean",
        steps={
            "one": 'echo \'{"reward": 1, "style": 1}\' > /logs/verifier/reward.json',
            "two": "echo 0 > /logs/verifier/reward.txt",
        },
    ),
    Feature(
        name="steps, final",
        toml='multi_step_reward_strategy = "final"',
        steps={"one": "echo 0 > /logs/verifier/reward.txt", "two": ONE},
    ),
    Feature(
        name="steps, min_reward",
        toml='[[steps]]\nname = "one"\nmin_reward = 0.6\n[[steps]]\nname = "two"',
        steps={"one": "echo 0.5 > /logs/verifier/reward.txt", "two": ONE},
    ),
    Feature(
        name="steps, min_reward of one key",
        toml='[[steps]]\nname = "one"\nmin_reward = { style = 0.6 }\n[[steps]]\nname = "two"',
        steps={"one": 'echo \'{"reward": 0, "style": 1}\' > /logs/verifier/reward.json', "two": ONE},
    ),
    Feature(
        name="steps, workdir/ and its setup.sh",
        steps={"one": "cat /app/given > /logs/verifier/reward.txt"},
        files={"steps/one/workdir/setup.sh": "echo 0.75 > given"},
        types="true",
    ),
)

GRADING = (
    Feature(name="separate verifier, tests/Dockerfile", toml=SEPARATE, files={"tests/Dockerfile": GRADER}),
    Feature(
        name="separate verifier, image of its own",
        toml='artifacts = ["/app/answer"]\n[verifier.environment]\ndocker_image = "debian:12-slim"\nworkdir = "/tests"',
        refused={"host": "docker_image"},
    ),
    Feature(
        name="artifacts: files, folders, /logs/artifacts",
        toml='artifacts = ["/app/out", { source = "/app/one", destination = "two" }, "/app/missing"]',
        types="mkdir out; echo a > out/a; echo 1 > one; echo p > /logs/artifacts/p",
    ),
    Feature(
        name="artifacts: exclude",
        toml='[[artifacts]]\nsource = "/app/out"\nexclude = ["*.log"]',
        types="mkdir out; echo a > out/a; echo b > out/b.log",
    ),
    Feature(
        name="[[verifier.collect]]",
        toml='artifacts = ["/app/dump"]\n[[verifier.collect]]\ncommand = "echo collected > /app/dump"',
    ),
)

SERVES = """import http.server, json, pathlib
class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        pathlib.Path("/seen").open("a").write(self.path + chr(10))
        self.send_response(200); self.end_headers()
        self.wfile.write(b"call it answer")
http.server.HTTPServer(("0.0.0.0", 8000), Answers).serve_forever()
"""
COMPOSE = """services:
  side:
    build: ./side
    healthcheck:
      test: ["CMD", "test", "-f", "/ready"]
      interval: 1s
  main:
    depends_on:
      side:
        condition: service_healthy
"""
SIDE = 'FROM debian:12-slim\nCOPY serve.py /serve.py\nCMD ["sh", "-c", "touch /ready; exec python3 /serve.py"]\n'
SIDECAR = {
    "environment/docker-compose.yaml": COMPOSE,
    "environment/side/Dockerfile": SIDE,
    "environment/side/serve.py": SERVES,
}
ASK = "python3 -c 'from urllib.request import urlopen; print(urlopen(\"http://side:8000/q\").read().decode().split()[-1])'"
WATCHES = "while sleep 0.1; do test -f /app/ask && touch /app/answer; done"
FAILS_ONCE = "mkdir /checked 2>/dev/null && exit 1; touch /app/answer"
NO_SIDECARS: dict[Place, str] = {"host": "docker-compose.yaml", "image": "docker-compose.yaml"}
SERVICES = (
    Feature(
        name="sidecar (environment/docker-compose.yaml)",
        files=SIDECAR,
        types=f"touch $({ASK})",
        refused=NO_SIDECARS,
    ),
    Feature(
        name="artifacts and [[verifier.collect]] of a sidecar",
        toml='[[artifacts]]\nsource = "/log"\nservice = "side"\n'
        '[[verifier.collect]]\nservice = "side"\ncommand = "cp /seen /log"',
        files=SIDECAR,
        types=f"touch $({ASK})",
        refused=NO_SIDECARS,
    ),
    Feature(
        name="simulated user (a sidecar that is asked)",
        files=SIDECAR,
        types=f"u=$({ASK})\ntouch $u",
        refused=NO_SIDECARS,
    ),
    Feature(
        name="ENTRYPOINT service",
        dockerfile='FROM debian:12-slim\nWORKDIR /app\nCOPY start.sh /start.sh\nENTRYPOINT ["/start.sh"]\n',
        files={
            "environment/start.sh": '(while sleep 0.1; do test -f /app/ask && touch /app/answer; done) &\nexec "$@"'
        },
        types="touch ask",
        types_s=3.0,
        refused={"host": "ENTRYPOINT"},
    ),
    Feature(
        name="HEALTHCHECK of the image",
        dockerfile="FROM debian:12-slim\nWORKDIR /app\nHEALTHCHECK --interval=1s CMD touch /app/answer\n",
        types="true",
        types_s=3.0,
        refused={"host": "HEALTHCHECK"},
    ),
    Feature(
        name="[environment.healthcheck]",
        toml=f'[environment.healthcheck]\ncommand = "{FAILS_ONCE}"\ninterval_sec = 0.1',
        types="true",
    ),
    Feature(
        name="[environment.healthcheck], never healthy",
        toml='[environment.healthcheck]\ncommand = "false"\ninterval_sec = 0.1\nretries = 2',
    ),
    Feature(
        name="healthcheck of a step",
        toml='[[steps]]\nname = "one"\n[steps.healthcheck]\ncommand = "touch /app/answer"',
        steps={"one": SOLVED},
        types="true",
    ),
    Feature(
        name="MCP servers",
        toml='[[environment.mcp_servers]]\nname = "tools"\ntransport = "stdio"\ncommand = "answer-tool"',
        prompted="answer-tool",
    ),
    Feature(
        name="skills",
        toml='[environment]\nskills_dir = "/skills"',
        dockerfile="FROM debian:12-slim\nWORKDIR /app\nCOPY SKILL.md /skills/answering/SKILL.md\n",
        files={"environment/SKILL.md": "---\nname: answering\ndescription: How to answer.\n---\nTouch it.\n"},
        prompted="How to answer.",
    ),
)

SETTINGS = (
    Feature(
        name="[environment.env]: a value, ${VAR}, ${VAR:-default}",
        toml='[environment.env]\nONE = "1"\nTWO = "${PARITY_TWO}"\nTHREE = "${PARITY_NONE:-3}"',
        host_env={"PARITY_TWO": "2"},
        types="echo $ONE$TWO$THREE > /logs/artifacts/agent",
        test=f"echo $ONE$TWO$THREE; {ONE}",
    ),
    Feature(
        name="[environment.env], a variable that is not set",
        toml='[environment.env]\nTWO = "${PARITY_NONE}"',
        refused={"host": "PARITY_NONE", "image": "PARITY_NONE", "docker": "PARITY_NONE"},
    ),
    Feature(
        name="[verifier.env]",
        toml='[verifier.env]\nONE = "${PARITY_ONE}"',
        host_env={"PARITY_ONE": "2"},
        types="echo agent:$ONE > /logs/artifacts/agent",
        test=f"echo verifier:$ONE; {ONE}",
    ),
    Feature(
        name="[environment] workdir",
        toml='[environment]\nworkdir = "/srv/work"',
        dockerfile="FROM debian:12-slim\nWORKDIR /srv/work\nWORKDIR /app\n",
        types="pwd > /logs/artifacts/agent",
        test=f"pwd; {ONE}",
    ),
    Feature(
        name="WORKDIR and ENV of the image",
        dockerfile="FROM debian:12-slim\nENV ONE=1 PATH=/opt/tool:$PATH\nWORKDIR /srv/work\n",
        types="echo $PWD $ONE $PATH > /logs/artifacts/agent",
        test=f"echo $PWD $ONE $PATH; {ONE}",
    ),
    Feature(
        name="[agent] user, [verifier] user",
        toml='[agent]\nuser = "games"\n[verifier]\nuser = "root"',
        types="id -un > /logs/artifacts/agent",
        test=f"id -un; {ONE}",
    ),
    Feature(
        name="USER of the image",
        dockerfile="FROM debian:12-slim\nWORKDIR /app\nUSER games\n",
        types="id -un > /logs/artifacts/agent",
        test=f"id -un; {ONE}",
    ),
    Feature(
        name="docker_image without a Dockerfile, its environment/",
        toml='[environment]\ndocker_image = "debian:12-slim"\nworkdir = "/srv"',
        dockerfile="",
        files={"environment/given": "0.5\n"},
        types="true",
        test="cat /srv/given > /logs/verifier/reward.txt",
        refused={"host": "docker_image"},
    ),
    Feature(
        name="memory_mb",
        toml="[environment]\nmemory_mb = 256\nstorage_mb = 64",
        types="python3 -c 'b\"x\" * (900 << 20)' || touch answer",
        types_s=4.0,
    ),
    Feature(name="cpus, storage_mb", toml="[environment]\ncpus = 1\nstorage_mb = 128"),
    Feature(
        name="network_mode public",
        toml='[environment]\nnetwork_mode = "public"',
        types="tail -n +3 /proc/net/dev | grep -qv lo: && touch answer",
    ),
    Feature(
        name="network_mode no-network",
        toml='[environment]\nnetwork_mode = "no-network"',
        types="tail -n +3 /proc/net/dev | grep -qv lo: || touch answer",
        needs="buildx",
    ),
    Feature(
        name="network_mode allowlist",
        toml='[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["example.com"]',
        needs="buildx",
        refused={"host": "allowlist", "image": "allowlist"},
    ),
    Feature(
        name="network_mode of one phase",
        toml='[agent]\nnetwork_mode = "no-network"',
        needs="buildx",
        refused={"host": "[agent] network_mode", "image": "[agent] network_mode"},
    ),
    Feature(
        name="[agent] timeout_sec with a multiplier",
        toml="[agent]\ntimeout_sec = 1.5",
        timeout_multiplier=2.0,
        thinks_s=30.0,
    ),
    Feature(
        name="[verifier] timeout_sec with a multiplier",
        toml="[verifier]\ntimeout_sec = 0.5",
        timeout_multiplier=2.0,
        test="sleep 30",
    ),
    Feature(
        name="GPUs",
        toml="[environment]\ngpus = 1",
        refused={"host": "gpus", "image": "gpus", "docker": "gpus"},
    ),
)

WHO = "echo $HOME $(umask) $(id)"
SURROUNDINGS = (
    Feature(
        name="HOME, umask and groups of a command",
        types=f"{WHO} > /logs/artifacts/agent",
        test=f"{WHO}; {ONE}",
    ),
    Feature(
        name="[verifier] user, not root",
        toml='[verifier]\nuser = "games"',
        test=f"id -un; {ONE}",
    ),
    Feature(
        name="a process that the agent leaves running",
        types="(while sleep 0.1; do touch /app/alive; done) &",
        test="rm -f /app/alive; for i in $(seq 50); do test -f /app/alive && break; sleep 0.1; done; "
        "test -f /app/alive && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt",
    ),
    Feature(
        name="links in tests, a process that the agent leaves running",
        links={"tests/again.sh": "test.sh", "tests/a": "more/b", "tests/gone": "/nowhere"},
        files={"tests/more/b": "b"},
        types="(while sleep 0.1; do touch /app/alive; done) &",
        test="rm -f /app/alive; for i in $(seq 50); do test -f /app/alive && break; sleep 0.1; done; "
        "test -f /app/alive && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt",
    ),
    Feature(
        name="a verifier that edits its tests and gives no reward",
        files={"tests/expected": "VALUE"},
        types="(while sleep 0.1; do touch /app/alive; done) &",
        test="sed -i s/VALUE/1/ /tests/expected; rm -f /app/alive; sleep 1; test -f /app/alive && exit 1; "
        "echo 0 > /logs/verifier/reward.txt",
    ),
    Feature(
        name="files of the image in /tests",
        dockerfile=DOCKERFILE + "RUN mkdir -p /tests/data && echo 1 > /tests/data/expected\n",
        test="cp /tests/data/expected /logs/verifier/reward.txt; ls /tests",
    ),
    Feature(
        name="test.sh that ends with an error, files beside it",
        files={
            "tests/more/expected": "0.5\n",
            "tests/helper.sh": "cat /tests/more/expected > /logs/verifier/reward.txt",
        },
        test="/tests/helper.sh; ls /tests; exit 3",
    ),
    Feature(
        name="docker_image and a Dockerfile",
        toml='[environment]\ndocker_image = "debian:12-slim"',
        dockerfile="FROM debian:12-slim\nWORKDIR /app\nENV ONE=1\n",
        types="true",
        test=f"echo $PWD:$ONE; {ONE}",
        differs={"host": "on the host's root, the Dockerfile's steps run and docker_image is ignored"},
    ),
    Feature(
        name="artifacts: links, odd names, other users",
        toml='artifacts = ["/app/out"]',
        types="mkdir -p out/deep; echo a > 'out/deep/a b ü'; ln -s /etc/hostname out/link; "
        "install -o games -m 600 /dev/null out/own",
    ),
    Feature(
        name="steps, separate verifiers, artifacts of a step",
        toml='[[steps]]\nname = "one"\nartifacts = ["/app/answer"]\n[steps.verifier]\nenvironment_mode = "separate"\n'
        '[[steps]]\nname = "two"',
        steps={"one": SOLVED, "two": SOLVED},
        files={"steps/one/tests/Dockerfile": GRADER},
    ),
    Feature(
        name="steps, user and time of their own",
        toml='[[steps]]\nname = "one"\n[steps.agent]\nuser = "games"\ntimeout_sec = 30.0\n[[steps]]\nname = "two"',
        steps={"one": ONE, "two": ONE},
        types="id -un > /logs/artifacts/agent",
    ),
    Feature(
        name="steps, a step whose setup.sh fails",
        steps={"one": ONE, "two": ONE},
        files={"steps/one/workdir/setup.sh": "exit 4"},
    ),
)

FEATURES: tuple[Feature, ...] = (*REWARDS, *STEPS, *GRADING, *SERVICES, *SETTINGS, *SURROUNDINGS)
