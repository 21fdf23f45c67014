"""Where settings come from, which source wins, and how each refusal is told."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from hone.cli.settings import SettingsError, add_arguments, read_settings
from hone.config import Settings
from hone.errors import HoneError


def read(*flags: str, **environment: str) -> Settings:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return read_settings(parser.parse_args(flags), environment)


def test_nothing_given_is_the_defaults() -> None:
    assert read() == Settings()
    assert read(PATH="/bin", HOME="/root", HONELY="1") == Settings(), "other variables are nobody's business"


def test_flags() -> None:
    settings = read("--http-port", "9000", "--grpc-port=9001", "--strict-readiness=false", "--exit-on-error")
    assert (settings.http_port, settings.grpc_port) == (9000, 9001)
    assert (settings.strict_readiness, settings.exit_on_error) == (False, True)
    assert read("--repository-poll-secs", "0.5").repository_poll_secs == 0.5
    assert read("--model-repository=a", "--model-repository", "b").model_repository == (Path("a"), Path("b"))
    assert read("--kernels-cache", "k").kernels_cache == Path("k")


@pytest.mark.parametrize("name", Settings.model_fields)
def test_every_setting_can_come_from_every_place(name: str, tmp_path: Path) -> None:
    value, expected = example(name)
    flag = "--" + name.replace("_", "-")
    extra = ["--grpc-use-ssl"] if name == "grpc_use_ssl_mutual" else []
    certificates = {}
    if name.startswith("grpc_use_ssl"):
        for setting in ("grpc_server_cert", "grpc_server_key", "grpc_root_cert"):
            (tmp_path / setting).touch()
            certificates[f"HONE_{setting.upper()}"] = str(tmp_path / setting)
    assert getattr(read(f"{flag}={value}", *extra, **certificates), name) == expected
    assert getattr(read(*extra, **{f"HONE_{name.upper()}": value}, **certificates), name) == expected
    file = tmp_path / "hone.toml"
    file.write_text(f"{name} = {toml(expected)}", encoding="utf-8")
    assert getattr(read("--config", str(file), *extra, **certificates), name) == expected
    assert getattr(read(*extra, HONE_CONFIG=str(file), **certificates), name) == expected


def example(name: str) -> tuple[str, Any]:
    """A value that is not the default, as text and as what it means."""
    special = {
        "http_restricted_api": "logging:key=v,a:l",
        "grpc_restricted_protocol": "logging:key=value",
        "tuning": "cache",
        "dashboard": "off",
        "model_control_mode": "poll",
        "log_format": "json",
        "trace_otlp_endpoint": "http://127.0.0.1:4318",
        "grpc_infer_response_compression_level": "low",
    }
    default = Settings.model_fields[name].default
    if name in special:
        text = special[name]
        return text, (text,) if isinstance(default, tuple) else text
    if isinstance(default, bool):
        return str(not default).lower(), not default
    if isinstance(default, int):
        return {"metrics_interval_ms": ("77", 77), "tuning_memory_mib": ("777", 777)}.get(name, ("7", 7))
    if isinstance(default, float):
        return ("0.25", 0.25) if name == "tuning_cpu_share" else ("7.5", 7.5)
    if name == "model_repository":
        return "x/y", (Path("x/y"),)
    if isinstance(default, tuple):
        return "x", ("x",)
    annotation = str(Settings.model_fields[name].annotation)
    return ("x/y", Path("x/y")) if "Path" in annotation else ("x", "x")


def toml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(toml(item) for item in value)}]"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, (int, float)) else f"'{value}'"


def test_the_strongest_source_wins(tmp_path: Path) -> None:
    file = tmp_path / "hone.toml"
    file.write_text("http_port = 1\ngrpc_port = 1\nmetrics_port = 1\nload_model = ['file']", encoding="utf-8")
    environment = {"HONE_CONFIG": str(file), "HONE_HTTP_PORT": "2", "HONE_GRPC_PORT": "2", "HONE_LOAD_MODEL": "v"}
    settings = read("--http-port=3", "--load-model=flag", **environment)
    assert (settings.http_port, settings.grpc_port, settings.metrics_port) == (3, 2, 1)
    assert settings.load_model == ("flag",), "lists are replaced, not joined"


def test_a_flag_names_the_file_before_the_variable_does(tmp_path: Path) -> None:
    file = tmp_path / "hone.toml"
    file.write_text("http_port = 1", encoding="utf-8")
    assert read("--config", str(file), HONE_CONFIG="/no/such/file").http_port == 1


def test_lists_in_variables() -> None:
    settings = read(HONE_MODEL_REPOSITORY="a;b", HONE_HTTP_RESTRICTED_API="logging,trace:k=v;health:h=x:y,z")
    assert settings.model_repository == (Path("a"), Path("b"))
    assert settings.http_restricted_api == ("logging,trace:k=v", "health:h=x:y,z")
    assert settings.restricted_http[1].value == "x:y,z"


@pytest.mark.parametrize(
    ("flags", "environment", "told"),
    [
        (("--http-port=x",), {}, "--http-port: "),
        (("--http-port=-1",), {}, "--http-port: "),
        (("--repository-poll-secs=0",), {}, "--repository-poll-secs: "),
        (("--repository-poll-secs=nan",), {}, "--repository-poll-secs: "),
        (("--exit-timeout-secs=-1",), {}, "--exit-timeout-secs: "),
        (("--grpc-use-ssl-mutual",), {}, "grpc_use_ssl_mutual needs grpc_use_ssl"),
        (("--grpc-use-ssl", "--grpc-server-cert=/no", "--grpc-server-key=/no"), {}, "grpc_server_cert: no such file"),
        ((), {"HONE_HTTP_PORT": ""}, "HONE_HTTP_PORT: "),
        ((), {"HONE_HTTP_PROT": "1"}, "unknown environment variable HONE_HTTP_PROT; did you mean 'HONE_HTTP_PORT'?"),
        ((), {"HONE_": "1"}, "unknown environment variable HONE_"),
        ((), {"HONE_TUNING": "yes"}, "HONE_TUNING: "),
        ((), {"HONE_CONFIG": "/no/such.toml"}, "cannot read settings from /no/such.toml"),
    ],
)
def test_refusals(flags: tuple[str, ...], environment: dict[str, str], told: str) -> None:
    with pytest.raises(SettingsError) as refused:
        read(*flags, **environment)
    assert told in str(refused.value)


def test_several_problems_are_told_at_once() -> None:
    with pytest.raises(SettingsError) as refused:
        read("--http-port=x", HONE_GRPC_PORT="y")
    assert "--http-port: " in str(refused.value)
    assert "HONE_GRPC_PORT: " in str(refused.value)


@pytest.mark.parametrize("value", ["inf", "nan"])
@pytest.mark.parametrize("flag", ["--exit-timeout-secs", "--repository-poll-secs"])
def test_times_are_finite(flag: str, value: str) -> None:
    with pytest.raises(SettingsError, match=flag):
        read(f"{flag}={value}")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("logging", "expected '<group>"),
        ("logging:key", "expected '<group>"),
        ("logging:=value", "expected '<group>"),
        ("logging:key=", "expected '<group>"),
        ("loging:key=v", "unknown group 'loging'"),
        (":key=v", "unknown group ''"),
    ],
)
def test_restrictions(text: str, told: str) -> None:
    for flag in ("--http-restricted-api", "--grpc-restricted-protocol"):
        with pytest.raises(HoneError) as refused:
            read(flag, text)
        assert told in str(refused.value)


def test_a_group_is_restricted_once() -> None:
    with pytest.raises(SettingsError, match="'logging' is restricted twice"):
        read("--http-restricted-api=logging:a=b", "--http-restricted-api=trace,logging:c=d")
