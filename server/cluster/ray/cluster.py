"""`everstream serve --ray`: starts a cluster of one machine, or joins one, and serves there.

A cluster of our own listens on the loopback alone and takes only those who show a
token that lives as long as it does. Its files are in a folder that no other user can
open. A cluster that is joined is as its owner has started it.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Mapping

from server.config import ServerConfig, set_environment

OBJECT_STORE_BYTES = 80 << 20

#: Seconds for a proxy of Serve to start. On a busy machine it has taken more than a minute.
PROXY_START_S = 600

#: Read by Ray when it is imported, and by its processes, which inherit them.
EVERYWHERE: Mapping[str, str] = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "server.cluster.ray.proxy:middlewares",
}
OF_OUR_OWN: Mapping[str, str] = {
    # Its name is from systems where Ray does so by default; else it takes the outer address.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
    # Serve gives up a proxy that is not ready after five seconds.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": str(PROXY_START_S),
    # A proxy is drained as soon as it has no request.
    "RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S": "0.001",
}


logger = logging.getLogger("everstream.ray")


class RayError(Exception):
    """Ray cannot be started or joined, or the application does not run there."""


def serve(config: ServerConfig, greet: Callable[[int], None]) -> int:
    """Serves until SIGINT or SIGTERM, drains, and returns the exit code.

    ``greet`` is called with the port when all replicas are there. Raises `RayError`,
    and `ConfigError` for what the replicas could not be made of.
    """
    set_environment(EVERYWHERE)
    if config.ray_address is not None:
        return _serve_joined(config, greet)
    set_environment({**OF_OUR_OWN, "RAY_AUTH_TOKEN": secrets.token_hex(32)})
    _import_ray()
    # Short: names of sockets have 107 bytes. No other user can pass it, and Ray opens to all what
    # it makes.
    folder = tempfile.mkdtemp(prefix="es-ray-", dir="/tmp")
    try:
        return _serve_own(config, greet, f"{folder}/ray")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _import_ray() -> None:
    """After the environment is as it should be."""
    try:
        import ray.serve  # noqa: F401
    except ImportError as error:
        raise RayError("--ray needs Ray: pip install 'everstream[ray]'") from error


def _serve_own(config: ServerConfig, greet: Callable[[int], None], folder: str) -> int:
    import ray

    from server.cluster.ray.application import STOP_MARGIN_S
    from server.cluster.ray.internals import drain_proxies

    most = config.num_replicas[1]
    with _Stop() as stop:
        ray.init(
            include_dashboard=False,
            num_cpus=max(os.cpu_count() or 1, most * (config.threads or 1)),
            object_store_memory=OBJECT_STORE_BYTES,
            logging_level=logging.WARNING,
            _temp_dir=folder,
        )
        try:
            exit_code = _serve_until(stop, config, greet)
            drain_proxies(config.drain_timeout_s + STOP_MARGIN_S)
            return exit_code
        finally:
            ray.shutdown()


def _serve_joined(config: ServerConfig, greet: Callable[[int], None]) -> int:
    _import_ray()
    import ray

    with _Stop() as stop:
        try:
            ray.init(address=config.ray_address, logging_level=logging.WARNING)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise RayError(f"--ray-address: {error}") from error
        try:
            return _serve_until(stop, config, greet)
        finally:
            ray.shutdown()


def _serve_until(stop: _Stop, config: ServerConfig, greet: Callable[[int], None]) -> int:
    from ray import serve
    from ray.serve.schema import LoggingConfig

    from server.cluster.ray.application import NAME, build, settings_of
    from server.cluster.ray.internals import wait_for_proxies

    stop.install()  # Ray has put its own in the place of ours
    port = config.port or _free_port(config.host)
    quiet = LoggingConfig(log_level="WARNING", enable_access_log=False)
    wait_for_proxies(PROXY_START_S)
    try:
        serve.start(http_options={"host": config.host, "port": port}, logging_config=quiet)
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        serve.run(build(settings_of(config)), name=NAME, route_prefix="/")
    except TimeoutError as error:
        raise RayError(f"Ray Serve does not start: {error}") from error
    except RuntimeError as error:
        raise RayError(f"the replicas do not start: {error}") from error
    greet(port)
    stop.wait()
    serve.delete(NAME)  # returns when its replicas have drained
    return 0


class _Stop:
    """SIGINT and SIGTERM end `wait`; before it, or a second time, they end the process."""

    def __init__(self) -> None:
        self._told = threading.Event()
        self._waits = False

    def __enter__(self) -> _Stop:
        signals = (*_SIGNALS, signal.SIGHUP)
        self._before = {number: signal.getsignal(number) for number in signals}
        self.install()
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def install(self) -> None:
        for number in _SIGNALS:
            signal.signal(number, self._tell)
        signal.signal(signal.SIGHUP, _explain)

    def wait(self) -> None:
        self._waits = True
        self._told.wait()

    def _tell(self, number: int, frame: object) -> None:
        if self._told.is_set() or not self._waits:
            raise SystemExit(128 + number)
        self._told.set()


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def _explain(number: int, frame: object) -> None:
    """One process reads its keys again at SIGHUP; here it must not end the cluster."""
    logger.warning("with --ray, keys are reloaded only by a restart")


def _free_port(host: str) -> int:
    """Serve cannot take one itself."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        port: int = listener.getsockname()[1]
        return port
