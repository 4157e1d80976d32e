import pytest

from headrace.config import (
    ConfigError,
    GatewaySettings,
    WorkerSettings,
    fields,
    known_names,
    load_settings,
    parse_memory,
    redact_url,
)


def test_environment_and_flags_are_read_and_flags_win() -> None:
    env = {
        "HEADRACE_MAX_NUM_SEQS": "8",
        "HEADRACE_PREFIX_CACHE": "no",
        "HEADRACE_BLOCK_SIZE": "32",
        "PATH": "/bin",
    }
    settings = load_settings(
        WorkerSettings, env, {"max_num_seqs": "4", "block_size": None, "target_itl_ms": "12.5"}
    )
    assert (settings.max_num_seqs, settings.block_size, settings.prefix_cache) == (4, 32, False)
    assert settings.target_itl_ms == 12.5


def test_defaults() -> None:
    settings = load_settings(WorkerSettings, {})
    assert settings.model is None
    assert settings.model_name == settings.pool == "smollm2"
    assert settings.worker_id != load_settings(WorkerSettings, {}).worker_id


@pytest.mark.parametrize("cls", [WorkerSettings, GatewaySettings])
def test_an_unknown_name_is_refused_with_the_closest_one(cls: type) -> None:
    with pytest.raises(ConfigError, match=r"HEADRACE_MAX_NUM_SEQ='8'.*did you mean HEADRACE_MAX_NUM_SEQS"):
        load_settings(cls, {"HEADRACE_MAX_NUM_SEQ": "8"})


def test_names_of_the_other_service_and_of_tests_are_accepted() -> None:
    assert load_settings(GatewaySettings, {"HEADRACE_LEASE_MS": "900", "HEADRACE_TEST_X": "1"}).port == 8080


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HEADRACE_MAX_NUM_SEQS", "many"),
        ("HEADRACE_MAX_NUM_SEQS", "0"),
        ("HEADRACE_MAX_NUM_SEQS", "1.5"),
        ("HEADRACE_LEASE_MS", "-1"),
        ("HEADRACE_PREFIX_CACHE", "maybe"),
        ("HEADRACE_DEVICE", "tpu"),
        ("HEADRACE_POOL", "a b"),
        ("HEADRACE_KV_MEMORY", "lots"),
        ("HEADRACE_KV_MEMORY", "101%"),
        ("HEADRACE_KV_MEMORY", "0"),
        ("HEADRACE_KV_DTYPE", "int4"),
        ("HEADRACE_METRICS_PORT", "65536"),
        ("HEADRACE_REDIS_URL", "localhost:6379"),
        ("HEADRACE_TARGET_ITL_MS", "nan"),
    ],
)
def test_a_bad_value_is_refused_by_name_and_value(name: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(WorkerSettings, {name: value})
    assert f"{name}={value}:" in str(caught.value)


def test_an_empty_variable_counts_as_not_set() -> None:
    settings = load_settings(WorkerSettings, {"HEADRACE_MODEL": "", "HEADRACE_MAX_NUM_SEQS": ""})
    assert (settings.model, settings.max_num_seqs) == (None, 32)


def test_a_gateway_open_to_other_machines_needs_keys_or_a_clear_word() -> None:
    with pytest.raises(ConfigError, match="HEADRACE_API_KEYS"):
        load_settings(GatewaySettings, {"HEADRACE_HOST": "0.0.0.0"})
    keys = load_settings(GatewaySettings, {"HEADRACE_HOST": "::", "HEADRACE_API_KEYS": "one, acme:two,"})
    assert keys.api_keys == ("one", "acme:two")
    assert load_settings(
        GatewaySettings, {"HEADRACE_HOST": "0.0.0.0"}, {"allow_anonymous": True}
    ).allow_anonymous
    assert load_settings(GatewaySettings, {"HEADRACE_HOST": "::1"}).host == "::1"


def test_secrets_stay_out_of_errors() -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(WorkerSettings, {"HEADRACE_REDIS_URL": "http://me:hunter2@host/0"})
    assert "hunter2" not in str(caught.value)
    assert redact_url("redis://:s3cret@h:1/0") == "redis://:***@h:1/0"
    assert redact_url("redis://h:1/0") == "redis://h:1/0"


def test_memory_sizes() -> None:
    assert parse_memory("1GiB", free_bytes=0) == 2**30
    assert parse_memory("1.5 mb", free_bytes=0) == 1_500_000
    assert parse_memory("50%", free_bytes=1000) == 500
    with pytest.raises(ValueError, match="share"):
        parse_memory("x", free_bytes=1)
    with pytest.raises(ValueError, match="nothing"):
        parse_memory("0", free_bytes=1)


@pytest.mark.parametrize("cls", [WorkerSettings, GatewaySettings])
def test_every_field_is_documented(cls: type) -> None:
    for field in fields(cls):
        assert field.description.endswith("."), field.name
        assert field.env in known_names()


def test_the_values_allowed_are_told() -> None:
    with pytest.raises(ConfigError, match="one of auto, cpu, cuda"):
        load_settings(WorkerSettings, {"HEADRACE_DEVICE": "tpu"})
    with pytest.raises(ConfigError, match="a whole number"):
        load_settings(WorkerSettings, {"HEADRACE_THREADS": "two"})


def test_the_value_of_an_unknown_secret_stays_out_of_errors() -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(GatewaySettings, {"HEADRACE_API_KEY": "hunter2"})
    assert "did you mean HEADRACE_API_KEYS" in str(caught.value)
    assert "hunter2" not in str(caught.value)
