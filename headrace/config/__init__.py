"""Settings of the services: frozen, from `HEADRACE_*` variables and flags, loud about what is unknown."""

from headrace.config.load import Field, fields, known_names, load_settings, refuse_unknown
from headrace.config.services import (
    CommonSettings,
    GatewaySettings,
    LogFormat,
    LogLevel,
    TasksSettings,
    WorkerSettings,
)
from headrace.config.values import (
    AUTO,
    ConfigError,
    default_cache_dir,
    env_name,
    host_part,
    parse_memory,
    redact_url,
)

__all__ = [
    "AUTO",
    "CommonSettings",
    "ConfigError",
    "Field",
    "GatewaySettings",
    "LogFormat",
    "LogLevel",
    "TasksSettings",
    "WorkerSettings",
    "default_cache_dir",
    "env_name",
    "fields",
    "host_part",
    "known_names",
    "load_settings",
    "parse_memory",
    "redact_url",
    "refuse_unknown",
]
