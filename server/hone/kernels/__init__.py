"""What is kept on disk: digests, device keys, and the cache of kernels, decisions, artifacts and constants."""

from hone.kernels.cache import Built, KernelsCache, VerifyReport
from hone.kernels.constants import constants_digest, load_constants, publish_constants
from hone.kernels.device_key import DeviceKey
from hone.kernels.digest import JSON, digest_of, digest_of_bytes, digest_of_file
from hone.kernels.entry import KINDS, SCHEMA, Entry, EntryName, Failure, FailureReason, Kind, Miss, MissReason
from hone.kernels.eviction import EvictionReport
from hone.kernels.folder import CacheUnsafe, Listed
from hone.kernels.keys import ArtifactKey, DecisionKey, KernelKey, Toolchain
from hone.kernels.locks import CacheBusy
from hone.kernels.quarantine import QuarantineRecord
from hone.kernels.statistics import CacheCounts
from hone.kernels.transfer import ImportRefused, ImportReport

__all__ = [
    "JSON",
    "KINDS",
    "SCHEMA",
    "ArtifactKey",
    "Built",
    "CacheBusy",
    "CacheCounts",
    "CacheUnsafe",
    "DecisionKey",
    "DeviceKey",
    "Entry",
    "EntryName",
    "EvictionReport",
    "Failure",
    "FailureReason",
    "ImportRefused",
    "ImportReport",
    "KernelKey",
    "KernelsCache",
    "Kind",
    "Listed",
    "Miss",
    "MissReason",
    "QuarantineRecord",
    "Toolchain",
    "VerifyReport",
    "constants_digest",
    "digest_of",
    "digest_of_bytes",
    "digest_of_file",
    "load_constants",
    "publish_constants",
]
