"""What `dynamic_batching` and its queue policies may say."""

from __future__ import annotations

from typing import Any

from hone.errors import ConfigError
from hone.protos import config_pb

_MAX_PRIORITY_LEVELS = 1000
_ACTIONS = config_pb.ModelQueuePolicy.TimeoutAction


def validate_scheduling(config: config_pb.ModelConfig, model: str) -> None:
    """Raises ConfigError."""
    if not config.HasField("dynamic_batching"):
        return
    batching = config.dynamic_batching
    _validate_preferred(config, model)
    _validate_priorities(batching, model)
    for path, policy in _policies(batching):
        if policy.timeout_action not in _ACTIONS.values():
            raise ConfigError(
                model, f"{path}.timeout_action", f"expected REJECT or DELAY, found {policy.timeout_action}"
            )
        if (
            batching.preserve_ordering
            and policy.timeout_action == config_pb.ModelQueuePolicy.DELAY
            and policy.default_timeout_microseconds
        ):
            raise ConfigError(
                model, f"{path}.timeout_action", "expected REJECT where preserve_ordering is true, found DELAY"
            )


def _validate_preferred(config: config_pb.ModelConfig, model: str) -> None:
    # Without inputs and outputs, auto-completion still has to find max_batch_size; it validates again afterwards.
    to_be_completed = config.max_batch_size == 0 and not (config.input and config.output)
    for i, size in enumerate(config.dynamic_batching.preferred_batch_size):
        path = f"dynamic_batching.preferred_batch_size[{i}]"
        if size < 1:
            raise ConfigError(model, path, f"expected 1 or more, found {size}")
        if size > config.max_batch_size and not to_be_completed:
            raise ConfigError(
                model,
                path,
                f"expected at most max_batch_size, which is {config.max_batch_size}, found {size};"
                " lower it, or set max_batch_size",
            )


def _validate_priorities(batching: Any, model: str) -> None:
    levels, default = batching.priority_levels, batching.default_priority_level
    path = "dynamic_batching"
    if levels > _MAX_PRIORITY_LEVELS:
        raise ConfigError(model, f"{path}.priority_levels", f"expected at most {_MAX_PRIORITY_LEVELS}, found {levels}")
    if levels and not 1 <= default <= levels:
        raise ConfigError(model, f"{path}.default_priority_level", f"expected 1 to {levels}, found {default}")
    if not levels and default:
        raise ConfigError(
            model, f"{path}.default_priority_level", f"expected none where priority_levels is 0, found {default}"
        )
    for level in sorted(batching.priority_queue_policy):
        if not 1 <= level <= levels:
            expected = f"a level of 1 to {levels}" if levels else "none where priority_levels is 0"
            raise ConfigError(
                model, f"{path}.priority_queue_policy[{level}]", f"expected {expected}, found level {level}"
            )
    if batching.preserve_ordering and levels > 1:
        raise ConfigError(
            model, f"{path}.priority_levels", f"expected at most 1 where preserve_ordering is true, found {levels}"
        )


def _policies(batching: Any) -> list[tuple[str, Any]]:
    """Every queue policy with its path."""
    policies = [("dynamic_batching.default_queue_policy", batching.default_queue_policy)]
    for level in sorted(batching.priority_queue_policy):
        policies.append((f"dynamic_batching.priority_queue_policy[{level}]", batching.priority_queue_policy[level]))
    return policies
