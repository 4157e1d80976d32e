"""Names and values of settings: what they are called, how they are read and shown."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from pathlib import Path

PREFIX = "HEADRACE_"
AUTO = "auto"
_MEMORY = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>B|KiB|MiB|GiB|TiB|KB|MB|GB|TB|%)?", re.IGNORECASE)
_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


class ConfigError(Exception):
    """A setting that is unknown or has a value that cannot be used. Names key, value and the way out."""


def env_name(field: str) -> str:
    return PREFIX + field.upper()


def refusal(name: str, value: object, expected: str) -> str:
    """The line that says what a setting should have been; never a secret."""
    shown = "(not shown)" if name == "api_keys" else redact_url(str(value))
    return f"{env_name(name)}={shown}: expected {expected.removeprefix('Expected ')}"


def redact_url(url: str) -> str:
    """The URL without its passwords, for logs and errors."""
    shown = re.sub(r"(?<=://)([^/@]*:)[^/@]*@", r"\1***@", url)
    return re.sub(r"(?<=password=)[^&]*", "***", shown)


def parse_memory(text: str, *, free_bytes: int) -> int:
    """Bytes of a size (`512MiB`, `1GiB`, `2GB`) or of a share of `free_bytes` (`50%`). Raises ValueError."""
    match = _MEMORY.fullmatch(text.strip())
    if match is None:
        raise ValueError("auto, a size like 512MiB or 1GiB, or a share of the free memory like 50%")
    number, unit = float(match["number"]), (match["unit"] or "").lower()
    if unit == "%" and number > 100:
        raise ValueError("a share of at most 100%")
    num_bytes = int(number / 100 * free_bytes) if unit == "%" else int(number * _UNITS[unit])
    if num_bytes < 1:
        raise ValueError("more than nothing, like 512MiB")
    return num_bytes


def host_part() -> str:
    """This host's name as it begins the worker ids made here."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:64]


def default_cache_dir() -> str:
    return str(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace")


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
