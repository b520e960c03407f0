"""Whether anything listens at the address of a Ray cluster; Ray itself waits there without an end and says nothing."""

from __future__ import annotations

import os
import socket
import time

from ...config.schema import ClusterConfig
from ...errors import ConfigError

LISTEN_S = 30.0
"""How long an address may stay silent at the start of a run: a head that was submitted together with it comes up."""


def address_of(cluster: ClusterConfig) -> str | None:
    """The address of the cluster to join; None where one is started here."""
    return cluster.address or os.environ.get("RAY_ADDRESS") or None


def answers(host: str, port: int, timeout_s: float = 3.0) -> bool:
    """True if something accepts connections there."""
    try:
        with socket.create_connection((host, port), timeout=timeout_s):
            return True
    except OSError:
        return False


def wait_for(cluster: ClusterConfig, patience_s: float | None = None) -> None:
    """Return once something listens at the cluster's address; ConfigError after `patience_s` (None: LISTEN_S) without.

    Addresses without a port (`auto`, `local`) are left to Ray.
    """
    address = address_of(cluster)
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if cluster.executor != "ray" or not host or not port.isdigit():
        return
    patience_s = LISTEN_S if patience_s is None else patience_s
    deadline = time.monotonic() + patience_s
    while not answers(host.strip("[]"), int(port)):
        if time.monotonic() >= deadline:
            raise ConfigError(
                f"nothing listens at {address!r}, the address of the Ray cluster (cluster.address or RAY_ADDRESS), after "
                f"{patience_s:.0f} s; start Ray there, correct it, or leave it out to run on this machine"
            )
        time.sleep(0.5)
