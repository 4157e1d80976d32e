"""The settings of each service: one frozen object, every field with its description and bounds."""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from headrace.config.values import (
    AUTO,
    ConfigError,
    default_cache_dir,
    host_part,
    is_loopback,
    parse_memory,
    refusal,
)
from headrace.keys import valid_pool
from headrace.redis_url import parse_redis_url

_ORIGIN = re.compile(r"https?://[^/?#@\s]+")
LogFormat = Literal["console", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]


def _worker_id() -> str:
    return f"{host_part()}-{os.getpid()}-{secrets.token_hex(3)}"


class CommonSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What every service needs to know."""

    redis_url: Annotated[
        str, Meta(description="Redis: redis://, rediss://, unix://, redis+sentinel:// or redis+cluster://.")
    ] = "redis://127.0.0.1:6379/0"
    pool: Annotated[str, Meta(description="Name of the pool: a set of workers that serve one model.")] = (
        "smollm2"
    )
    max_body_bytes: Annotated[int, Meta(ge=1, description="Largest request accepted, bytes.")] = 1_048_576
    max_queue_entries: Annotated[
        int,
        Meta(ge=0, description="Waiting jobs above which new ones are refused as overloaded; 0: no limit."),
    ] = 10_000
    max_queue_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="Bytes of requests waiting or running above which new jobs are refused; 0: no limit.",
        ),
    ] = 268_435_456
    retention_ms: Annotated[
        int, Meta(ge=1, description="How long a job and its log stay after its end, ms.")
    ] = 3_600_000
    drain_timeout_s: Annotated[
        float,
        Meta(ge=0, description="Time given to running jobs after SIGTERM before they are handed back, s."),
    ] = 30.0
    log_format: Annotated[
        LogFormat, Meta(description="console (for people) or json (one object a line).")
    ] = "console"
    log_level: Annotated[LogLevel, Meta(description="Least severe level that is logged.")] = "info"
    cache_dir: Annotated[
        str, Meta(description="Folder of downloaded models and of the embedded Redis's data.")
    ] = msgspec.field(default_factory=default_cache_dir)

    def __post_init__(self) -> None:
        if not valid_pool(self.pool):
            raise ConfigError(refusal("pool", self.pool, "1 to 64 characters of A-Z a-z 0-9 . _ -"))
        try:
            parse_redis_url(self.redis_url)
        except ValueError as problem:
            raise ConfigError(refusal("redis_url", self.redis_url, str(problem))) from None


class WorkerSettings(CommonSettings, frozen=True, kw_only=True):
    """Settings of `python -m worker`."""

    model: Annotated[
        str | None, Meta(description="Folder, GGUF file or hub id of the model; not set: the demo model.")
    ] = None
    model_name: Annotated[str, Meta(description="Name the model is served under; not set: the pool's.")] = ""
    device: Annotated[Literal["auto", "cpu", "cuda"], Meta(description="Where the model runs.")] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(description="Type of the arithmetic; auto: float32 on a CPU, the checkpoint's own on a GPU."),
    ] = "auto"
    threads: Annotated[int, Meta(ge=0, description="CPU threads for the model; 0: as many as cores.")] = 0
    max_num_seqs: Annotated[int, Meta(ge=1, description="Most sequences in the running batch.")] = 32
    max_num_batched_tokens: Annotated[int, Meta(ge=1, description="Token budget of one step.")] = 256
    num_kv_blocks: Annotated[
        int, Meta(ge=0, description="KV cache blocks; 0: as many as kv_memory holds.")
    ] = 0
    kv_memory: Annotated[
        str,
        Meta(
            description="Most memory of the KV cache: a size (1GiB), a share of what is free (50%), or auto: "
            "512 tokens for each sequence, at least one full context, at most half of what is free."
        ),
    ] = AUTO
    kv_dtype: Annotated[
        Literal["auto", "fp32", "bf16", "fp16", "int8", "fp8"],
        Meta(
            description="How keys and values are kept; auto: as the model computes, int8 with int8 "
            "activations. fp8 needs a GPU."
        ),
    ] = "auto"
    block_size: Annotated[int, Meta(ge=1, description="Tokens in a KV cache block.")] = 16
    batching: Annotated[
        Literal["continuous", "static", "dynamic"],
        Meta(
            description="When jobs join the batch: at each step, or (to compare) only between whole batches."
        ),
    ] = "continuous"
    batch_wait_ms: Annotated[
        int, Meta(ge=0, description="With dynamic batching: longest wait for a batch to fill, ms.")
    ] = 50
    policy: Annotated[
        Literal["fcfs", "shortest-first", "deadline"], Meta(description="Order of service within the worker.")
    ] = "fcfs"
    adaptive: Annotated[
        bool,
        Meta(
            description="Choose each step's tokens and sequences from measured step times, within "
            "max_num_batched_tokens and max_num_seqs; false: always these."
        ),
    ] = True
    target_itl_ms: Annotated[
        float,
        Meta(ge=0, description="Inter-token time that adaptive batching keeps, ms; 0: most tokens a second."),
    ] = 100.0
    speculative_tokens: Annotated[
        int,
        Meta(
            ge=0,
            le=64,
            description="Most tokens guessed ahead of an answer, from what it and its prompt said before, "
            "and computed in one step where that pays; no bit changes. 0: none. Exact models on CPUs.",
        ),
    ] = 8
    prefix_cache: Annotated[bool, Meta(description="Share the KV blocks of equal prompt beginnings.")] = True
    lease_ms: Annotated[
        int, Meta(ge=100, description="A worker silent for this long loses its jobs to others, ms.")
    ] = 5_000
    stall_timeout_s: Annotated[
        float,
        Meta(ge=0, description="A step that takes this long ends the worker, and others go on, s; 0: never."),
    ] = 60.0
    max_attempts: Annotated[
        int, Meta(ge=1, description="Workers that may die over a job that runs alone before it is given up.")
    ] = 2
    default_max_tokens: Annotated[
        int, Meta(ge=1, description="Tokens of a job that sets no max_tokens, bounded by the context.")
    ] = 1024
    worker_id: Annotated[
        str, Meta(description="Unique name; not set: host, process id and a random part.")
    ] = msgspec.field(default_factory=_worker_id)
    kernels: Annotated[
        Literal["auto", "torch", "cpu", "triton"],
        Meta(description="Kernel backend; auto: the fastest that runs here. A missing one is an error."),
    ] = "auto"
    metrics_port: Annotated[int, Meta(ge=0, le=65535, description="Port of /metrics; 0: off.")] = 0
    metrics_host: Annotated[str, Meta(description="Address that /metrics listens on.")] = "127.0.0.1"
    weights: Annotated[
        Literal["auto", "fp32", "bf16", "q8", "q4"],
        Meta(description="How the compiled CPU kernels keep weights; auto: as the file has them."),
    ] = "auto"
    activations: Annotated[
        Literal["fp32", "int8"],
        Meta(
            description="Arithmetic of products on the CPU; int8: in groups of 32, faster and less precise."
        ),
    ] = "fp32"
    tensor_parallel: Annotated[
        int,
        Meta(
            ge=1,
            description="Processes on this machine that share the model, each with its part of the heads; "
            "on a GPU each has one of its own.",
        ),
    ] = 1
    trust_remote_code: Annotated[
        bool, Meta(description="Run Python code that comes with the model. Only for models you trust.")
    ] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tensor_parallel > 1 and (self.weights not in (AUTO, "fp32") or self.activations != "fp32"):
            forms = f"HEADRACE_WEIGHTS={self.weights} and HEADRACE_ACTIVATIONS={self.activations}"
            expected = f"1 with {forms}; more processes compute with both set to fp32"
            raise ConfigError(refusal("tensor_parallel", self.tensor_parallel, expected))
        try:
            if self.kv_memory != AUTO:
                parse_memory(self.kv_memory, free_bytes=2**40)
        except ValueError as problem:
            raise ConfigError(refusal("kv_memory", self.kv_memory, str(problem))) from None
        if not self.model_name:
            msgspec.structs.force_setattr(self, "model_name", self.pool)


class GatewaySettings(CommonSettings, frozen=True, kw_only=True):
    """Settings of `python -m gateway`."""

    host: Annotated[str, Meta(description="Address that the gateway listens on.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port that the gateway listens on; 0: any.")] = 8080
    api_keys: Annotated[
        tuple[str, ...], Meta(description="Accepted keys, separated by commas, each KEY or TENANT:KEY.")
    ] = ()
    allow_anonymous: Annotated[
        bool,
        Meta(description="Serve requests without a key. Needed to listen beyond this machine without keys."),
    ] = False
    require_key: Annotated[
        bool,
        Meta(description="Serve nobody without a key, also while none has been made yet."),
    ] = False
    cors_origins: Annotated[
        tuple[str, ...],
        Meta(
            description="Web pages whose scripts may ask, by origin (https://a.example), with commas; *: all."
        ),
    ] = ()
    heartbeat_s: Annotated[
        float, Meta(gt=0, description="A comment is sent into a stream that was silent for this long, s.")
    ] = 10.0
    max_file_bytes: Annotated[
        int, Meta(ge=1, le=536_870_912, description="Largest file that can be uploaded, bytes.")
    ] = 33_554_432
    max_tenant_bytes: Annotated[
        int, Meta(ge=1, description="Most that one tenant's files may take together, bytes.")
    ] = 268_435_456
    file_retention_ms: Annotated[
        int, Meta(ge=1, description="How long files and batches stay, unless the upload asks for less, ms.")
    ] = 604_800_000
    response_retention_ms: Annotated[
        int, Meta(ge=1, description="How long a stored response can be looked up and gone on with, ms.")
    ] = 86_400_000

    def __post_init__(self) -> None:
        super().__post_init__()
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ConfigError(refusal("cors_origins", origin, "an origin like https://app.example, or *"))
        guarded = self.api_keys or self.require_key
        if not (guarded or self.allow_anonymous or is_loopback(self.host)):
            way_out = (
                "set HEADRACE_REQUIRE_KEY=true (and make keys with `headrace keys create`) or "
                "HEADRACE_API_KEYS, or HEADRACE_ALLOW_ANONYMOUS=true to serve everybody"
            )
            raise ConfigError(f"HEADRACE_HOST={self.host} is reachable from other machines: {way_out}")


class TasksSettings(CommonSettings, frozen=True, kw_only=True):
    """Settings of `python -m gateway.tasks`."""

    webhook_timeout_s: Annotated[
        float, Meta(gt=0, le=60, description="Time an endpoint has to take a webhook and answer, s.")
    ] = 10.0
    webhook_attempts: Annotated[
        int, Meta(ge=1, le=50, description="Attempts before a webhook is given up.")
    ] = 10
    webhook_backoff_s: Annotated[
        float, Meta(gt=0, description="Wait before a second attempt, s; four times as long before each next.")
    ] = 5.0
    webhook_host_limit: Annotated[
        int, Meta(ge=1, description="Webhooks under way to one host at a time, in one process.")
    ] = 4
    webhook_networks: Annotated[
        tuple[str, ...],
        Meta(description="Private networks that webhooks may go to, separated by commas, like 10.1.0.0/16."),
    ] = ()
    webhook_retention_ms: Annotated[
        int, Meta(ge=60_000, description="How long a webhook can be looked up and sent again, ms.")
    ] = 86_400_000
    batch_window: Annotated[
        int, Meta(ge=1, le=1000, description="Jobs of one batch that wait or run at a time.")
    ] = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        for network in self.webhook_networks:
            try:
                ipaddress.ip_network(network)
            except ValueError as problem:
                raise ConfigError(refusal("webhook_networks", network, f"a network: {problem}")) from None


SERVICES: tuple[type[CommonSettings], ...] = (WorkerSettings, GatewaySettings, TasksSettings)
