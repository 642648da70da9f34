"""Load balancers from elsewhere, as processes in front of servers on this machine."""

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

NGINX = """
daemon off;
pid {folder}/pid;
error_log {folder}/errors;
worker_processes 1;
events {{ worker_connections 512; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
{http}
}}
"""
HAPROXY = """
global
  stats socket {folder}/stats
defaults
  timeout connect 5s
  timeout client 600s
  timeout server 600s
  retries 3
  option redispatch
{rest}
"""


@contextmanager
def nginx(folder: Path, http: str) -> Iterator[Path]:
    """Run nginx with the lines of its http block; yield the socket that these listen on.

    http: has {socket} where the address to listen on belongs.
    """
    socket = folder / "socket"
    config = folder / "nginx.conf"
    lines = http.replace("{socket}", f"unix:{socket}")
    config.write_text(NGINX.format(folder=folder, http=lines))
    with _process(["nginx", "-p", str(folder), "-c", str(config)], socket, folder / "errors"):
        yield socket


@contextmanager
def haproxy(folder: Path, rest: str) -> Iterator[Path]:
    """Run haproxy with the sections after `defaults`; yield the socket that these listen on.

    rest: has {socket} where the address to listen on belongs.
    """
    socket = folder / "socket"
    config = folder / "haproxy.cfg"
    config.write_text(HAPROXY.format(folder=folder, rest=rest.replace("{socket}", str(socket))))
    with _process(["haproxy", "-db", "-f", str(config)], socket, folder / "errors"):
        yield socket


@contextmanager
def _process(command: list[str], socket: Path, errors: Path) -> Iterator[None]:
    """Run a program until the block ends; it listens on the socket when the block begins."""
    program = shutil.which(command[0], path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")
    if program is None:
        pytest.skip(f"{command[0]} is not installed")
    with errors.open("a") as output:
        process = subprocess.Popen([program, *command[1:]], stdout=output, stderr=output)
    end = time.monotonic() + 60
    try:
        while not socket.exists():
            assert process.poll() is None and time.monotonic() < end, errors.read_text()
            time.sleep(0.01)
        yield
    finally:
        process.terminate()
        process.wait(60)
