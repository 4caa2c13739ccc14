"""compose.yaml, the Dockerfile and the front's configuration say what the program knows."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import httpx
import pytest
import yaml

from cli.main import tenuto
from sessions.keys import ApiKeys
from sessions.service.access import OPEN
from tests.redis_server import RedisServer, free_port
from tests.tiny import write_tiny

ROOT = Path(__file__).parent.parent
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text("utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {name: service for name, service in SERVICES.items() if service["image"] == "tenuto"}
WORKERS = {name: service for name, service in OURS.items() if service["command"][0] == "serve"}
FRONT = ROOT / "deploy" / "haproxy.cfg"


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's, each on one line."""
    text = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text("utf-8"))
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines]


DOCKERFILE = instructions()


def said(instruction: str) -> list[str]:
    return [rest for word, rest in DOCKERFILE if word == instruction]


def parse(arguments: list[str]) -> None:
    """Raises a click error unless the command line is one, without running anything."""
    command: click.Command = tenuto
    # A command keeps the help option of the context in which it was first made: the same one as a person's.
    with click.Context(tenuto, **tenuto.context_settings) as ctx:
        while isinstance(command, click.Group):
            command = command.commands[arguments[0]]
            arguments = arguments[1:]
        command.make_context(command.name, list(arguments), parent=ctx)


# --- compose.yaml ---------------------------------------------------------------------------------


def test_there_are_two_workers_on_one_redis_behind_a_front() -> None:
    assert len(WORKERS) == 2
    assert {service["environment"]["TENUTO_STORE"] for service in WORKERS.values()} == {
        "redis://redis:6379/0"
    }
    assert set(SERVICES["front"]["depends_on"]) == set(WORKERS)


@pytest.mark.parametrize("name", OURS)
def test_every_command_is_one_that_tenuto_knows(name: str) -> None:
    command = OURS[name]["command"]
    assert all(isinstance(word, str) for word in command), "YAML made a number or a truth of a word"
    parse(command)
    with pytest.raises(click.UsageError):
        parse([*command, "--no-such-option"])


def test_every_variable_is_one_that_tenuto_reads() -> None:
    sources = "".join(path.read_text("utf-8") for path in (ROOT / "cli").glob("*.py"))
    read = set(re.findall(r'"(TENUTO_[A-Z_]+)"', sources))
    given = {name for service in OURS.values() for name in service["environment"]}
    given |= {part.split("=")[0] for rest in said("ENV") for part in rest.split()}
    assert given <= read


def test_what_is_depended_on_and_mounted_is_there() -> None:
    for service in SERVICES.values():
        for name, wish in service.get("depends_on", {}).items():
            needs_check = wish["condition"] == "service_healthy"
            has_check = "healthcheck" in SERVICES[name] or (name in OURS and said("HEALTHCHECK"))
            assert has_check or not needs_check, name
        for mount in service.get("volumes", ()):
            source = mount.split(":")[0]
            assert (ROOT / source).is_file() if source.startswith(".") else source in COMPOSE["volumes"]


def test_a_worker_has_longer_to_stop_than_its_turns_have_to_end() -> None:
    for service in WORKERS.values():
        drain = service["command"][service["command"].index("--drain") + 1]
        assert int(service["stop_grace_period"].rstrip("s")) > int(drain.rstrip("s"))


def test_redis_may_evict_rows_and_never_a_conversation() -> None:
    command = SERVICES["redis"]["command"]
    options = dict(zip(command[1::2], command[2::2], strict=True))
    assert all(isinstance(word, str) for word in command)
    assert options["--maxmemory-policy"].startswith("volatile-")
    assert options["--appendonly"] == "yes"


def test_nothing_is_reached_from_elsewhere_but_the_front_and_that_from_here_alone() -> None:
    assert [name for name, service in SERVICES.items() if "ports" in service] == ["front"]
    (port,) = SERVICES["front"]["ports"]
    assert port.startswith("127.0.0.1:")


def test_the_front_knows_the_workers_and_asks_what_they_answer_without_a_key() -> None:
    text = FRONT.read_text("utf-8")
    servers = dict(re.findall(r"^ +server (\S+) \S+:(\d+)$", text, re.MULTILINE))
    ports = {service["command"][service["command"].index("--port") + 1] for service in WORKERS.values()}
    assert set(servers) == set(WORKERS)
    assert set(servers.values()) == ports
    (path,) = re.findall(r"httpchk GET (\S+)", text)
    assert path in OPEN
    (port,) = re.findall(r"bind :(\d+)", text)
    assert SERVICES["front"]["ports"][0].endswith(f":{port}")


# --- the image ------------------------------------------------------------------------------------


def test_the_image_does_not_run_as_root() -> None:
    users = [at for at, (word, _) in enumerate(DOCKERFILE) if word == "USER"]
    assert DOCKERFILE[users[-1]][1] not in ("root", "0")
    after = {word for word, _ in DOCKERFILE[users[-1] :]}
    assert after <= {"USER", "WORKDIR", "ENV", "VOLUME", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"}


def test_the_image_installs_what_is_pinned_and_torch_for_a_cpu_from_there_too() -> None:
    (install,) = [rest for rest in said("RUN") if "pip install" in rest]
    torch, project = (shlex.split(step, posix=False) for step in install.split("&&"))
    assert "$(grep '^torch==' constraints.txt)" in install
    assert torch[0] == 'PIP_INDEX_URL="$TORCH_INDEX"'
    (index,) = said("ARG")
    assert index.endswith("/cpu")
    pins = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    assert len([line for line in pins if re.match(r"^torch==[\d.]+$", line)]) == 1
    assert project[project.index("-c") + 1] == "constraints.txt"
    extras = re.findall(r"\.\[(.*)\]", install)[0].split(",")
    known = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    assert "serve" in extras
    assert set(extras) <= set(known)


def copied() -> Iterator[str]:
    for rest in said("COPY"):
        *sources, _ = rest.split()
        yield from sources


def test_what_is_copied_is_enough_to_build_the_whole_project(tmp_path: Path) -> None:
    allowed = set(re.findall(r"^!(.*)$", (ROOT / ".dockerignore").read_text("utf-8"), re.MULTILINE))
    assert set(copied()) == allowed
    for name in copied():
        source, target = ROOT / name, tmp_path / "src" / name
        target.parent.mkdir(exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copy(source, target)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")]
    subprocess.run(command, cwd=tmp_path / "src", check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    shipped = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")}
    packages = [name for name in copied() if (ROOT / name).is_dir()]
    assert shipped == {str(p.relative_to(ROOT)) for top in packages for p in (ROOT / top).rglob("*.py")}


def test_the_images_own_command_and_check_are_right() -> None:
    (entry,), (command,) = said("ENTRYPOINT"), said("CMD")
    assert yaml.safe_load(entry) == ["tenuto"]
    parse(yaml.safe_load(command))
    (check,) = said("HEALTHCHECK")
    (path,) = re.findall(r"127\.0\.0\.1:8080(/\w+)", check)
    assert path in OPEN
    program = yaml.safe_load(check.partition("CMD")[2])
    compile(program[2], "the health check", "exec")
    assert program[:2] == ["python", "-c"]


# --- all of it, where there is a haproxy ----------------------------------------------------------


@contextmanager
def process(*command: str) -> Iterator[subprocess.Popen[str]]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    popen = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env)
    try:
        yield popen
    finally:
        popen.kill()
        popen.communicate()


@pytest.mark.redis
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("haproxy") is None, reason="no haproxy on the PATH")
def test_a_conversation_goes_from_worker_to_worker_through_the_front(tmp_path: Path) -> None:
    """The processes of compose.yaml with its options and its front's configuration, on one machine."""
    model, keys = write_tiny(tmp_path / "tiny.gguf"), tmp_path / "keys"
    _, key = ApiKeys(keys).create("default")
    config = FRONT.read_text("utf-8")
    with RedisServer() as redis, process_of_workers(redis, model, keys) as ports:
        for name, port in ports.items():
            config = config.replace(f"server {name} {name}:8080", f"server {name} 127.0.0.1:{port}")
        front = free_port()
        config = config.replace("bind :8080", f"bind 127.0.0.1:{front}")
        (tmp_path / "haproxy.cfg").write_text(config, "utf-8")
        with process("haproxy", "-f", str(tmp_path / "haproxy.cfg")):
            talk_through(f"http://127.0.0.1:{front}", key)
            served = [_turns_of(port, key) for port in ports.values()]
    assert served == [3, 3], "a round robin"


@contextmanager
def process_of_workers(redis: RedisServer, model: Path, keys: Path) -> Iterator[dict[str, int]]:
    ports = {name: free_port() for name in WORKERS}
    commands = []
    for name, port in ports.items():
        words = [str(port) if word == "8080" else word for word in WORKERS[name]["command"]]
        words = ["127.0.0.1" if word == "0.0.0.0" else word for word in words]
        given = ["--store", redis.url, "--model", str(model), "--keys", str(keys), "--ctx", "2048"]
        commands.append((sys.executable, "-m", "cli.main", *words, *given))
    with process(*commands[0]) as one, process(*commands[1]) as other:
        for popen in (one, other):
            assert popen.stdout is not None
            assert " at http://" in popen.stdout.readline()
        yield ports


def talk_through(url: str, key: str) -> None:
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        client.headers["authorization"] = f"Bearer {key}"
        until = time.monotonic() + 30
        while time.monotonic() < until and not _is_up(client):
            time.sleep(0.05)
        client.post("/v1/sessions", json={"name": "tea"}).raise_for_status()
        for turn in range(6):
            answer = client.post(
                "/v1/sessions/tea/messages",
                json={"messages": [{"role": "user", "content": "and?"}], "max_tokens": 4},
            )
            assert answer.status_code == 200, answer.text
            assert turn == 0 or answer.headers["x-tenuto-recomputed-tokens"] == "0"


def _is_up(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def _turns_of(port: int, key: str) -> int:
    answer = httpx.get(
        f"http://127.0.0.1:{port}/metrics", headers={"authorization": f"Bearer {key}"}, trust_env=False
    )
    counts = re.findall(r"^tenuto_restores_total\{.*\} ([\d.]+)$", answer.text, re.MULTILINE)
    return int(sum(float(count) for count in counts))
