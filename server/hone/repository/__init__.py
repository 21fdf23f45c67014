"""What is on disk: model folders, versions, config.pbtxt, auto-completion, polling."""

from hone.repository.autocomplete import complete
from hone.repository.config_json import config_from_json, config_to_json
from hone.repository.datatypes import config_datatype, protocol_datatype
from hone.repository.definition import ModelDefinition
from hone.repository.layout import ModelFolder, check_model_name
from hone.repository.poller import PollResult, RepositoryPoller
from hone.repository.repository import ModelRepository
from hone.repository.shapes import narrowed, to_client, to_engine
from hone.repository.signatures import parse_signatures
from hone.repository.warmup import WarmupSample, warmup_samples

__all__ = [
    "ModelDefinition",
    "ModelFolder",
    "ModelRepository",
    "PollResult",
    "RepositoryPoller",
    "WarmupSample",
    "check_model_name",
    "complete",
    "config_datatype",
    "config_from_json",
    "config_to_json",
    "narrowed",
    "parse_signatures",
    "protocol_datatype",
    "to_client",
    "to_engine",
    "warmup_samples",
]
